"""Owns the messages about HTTP between the server and an instance: requests, parts of answers, and control."""

from __future__ import annotations

import msgspec

from sgl_batch.control_plane.instances.service_state import ServiceState

MAX_BODY_BYTES = 64 << 20
"""The longest body of a request to an instance."""

Headers = tuple[tuple[bytes, bytes], ...]


class HttpRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request to SGLang's endpoints of an instance. `target`: path and query. `body`: None without one.

    `call` names the request, so that one that is sent again is not begun twice.
    """

    call: str
    method: str
    target: str
    headers: Headers = ()
    body: bytes | None = None


class HttpMore(msgspec.Struct, frozen=True, array_like=True):
    """Asks for a part of an answer. `number`: that of the last part, if it is to come again, or the next one."""

    call: str
    number: int


class HttpCall(msgspec.Struct, frozen=True, array_like=True):
    """Names a request that is not wanted any more."""

    call: str


class HttpPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of an answer: what has come of it since the part before. It may be empty.

    Attributes:
        number: From 1.
        status: HTTP's; 0 while the head has not come. It and the headers are in each part after that.
        is_last: Nothing follows.
        fault: Why the end of the answer does not come.
    """

    number: int
    status: int = 0
    headers: Headers = ()
    data: bytes = b""
    is_last: bool = False
    fault: str | None = None


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """A request that controls the engine of an instance.

    `before`, `after`: the state of the service without it and with it; None where it does not change the state.
    """

    request: HttpRequest
    before: ServiceState | None = None
    after: ServiceState | None = None


class Controlled(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a Control.

    Attributes:
        status: HTTP's, of the engine; 0 where no engine was ready: the next one gets the state of the service first.
        content_type, body: The engine's answer; or the body says why there is none.
        weight_version: SGLang's name of the weights of the engine afterwards, where it is known.
    """

    status: int
    content_type: str = "text/plain"
    body: bytes = b""
    weight_version: str | None = None
