"""Owns the messages between the pool and an instance. They cross Ray as bytes (MessagePack), not as pickles of ours."""

from __future__ import annotations

from hashlib import blake2b
from typing import TypeVar

import msgspec

from sgl_batch.core.answers import EngineStats
from sgl_batch.core.plan_rates import PlanRates

M = TypeVar("M", bound=msgspec.Struct)

UPDATING, OUTDATED = "updating", "outdated"
"""Phases of an engine that is ready but takes no lines: it is brought to the state of the service, or lacks it."""


class Line(msgspec.Struct, frozen=True, array_like=True):
    """A request. `partial_output`: the first tokens of its answer, packed, from an instance that is gone."""

    key: str
    url: str
    body: bytes
    partial_output: bytes = b""


class Lot(msgspec.Struct, frozen=True, array_like=True):
    """Lines that are given to an instance at once."""

    lines: tuple[Line, ...]


class Answered(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a line. `number`: of the answers of this incarnation, from 1; it never has gaps."""

    number: int
    key: str
    status_code: int
    request_id: str
    body: bytes


class Tokens(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of an unanswered line: `tokens`, packed, from position `start` on."""

    key: str
    start: int
    tokens: bytes


class EngineDeath(msgspec.Struct, frozen=True, array_like=True):
    """The engine of an instance has died; `keys` are the lines that it had, which the instance no longer has.

    `number`: of the deaths of this incarnation, from 1. `code`: that of the EngineError; None blames the lines.
    """

    number: int
    message: str
    code: str | None
    keys: tuple[str, ...]


class EngineFacts(msgspec.Struct, frozen=True, array_like=True):
    """What an engine says of itself when it is ready."""

    served_model_names: tuple[str, ...]
    forward: str = ""
    plan_rates: PlanRates | None = None


class Poll(msgspec.Struct, frozen=True, array_like=True):
    """Asks for a report of what comes after these numbers, at once where there is something, or after `wait_s`.

    `acknowledged`: keys whose answers, of numbers up to `after_answer`, are committed: the instance need not keep them.
    """

    after_answer: int = 0
    after_death: int = 0
    wait_s: float = 0.0
    acknowledged: tuple[str, ...] = ()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance reports.

    Attributes:
        incarnation: Whose report it is.
        phase, message: As `EngineState` of its engine: starting, ready, stalled, restarting, failed or stopped; or
            UPDATING or OUTDATED.
        restarts: How often its engine was started again.
        facts: Of the ready engine, else None.
        answers: After the last one that the pool has; those of earlier incarnations first. At most some megabytes.
        deaths: After the last one that the pool has.
        tokens: Since the last report.
        in_flight: Lines that its engine has not answered.
        stats: The last statistics of its engine; None before the first.
    """

    incarnation: int
    phase: str
    message: str | None = None
    restarts: int = 0
    facts: EngineFacts | None = None
    answers: tuple[Answered, ...] = ()
    deaths: tuple[EngineDeath, ...] = ()
    tokens: tuple[Tokens, ...] = ()
    in_flight: int = 0
    stats: EngineStats | None = None


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """The statistics of an engine, read when they were asked for; None where none is ready.

    `restarts`: as in the report of its instance.
    """

    restarts: int
    stats: EngineStats | None = None


def encode(message: msgspec.Struct) -> bytes:
    """Return the bytes of a message."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[M]) -> M:
    """Return the message of bytes that `encode` made."""
    return msgspec.msgpack.decode(data, type=kind)


def key_of(url: str, body: bytes, occurrence: int) -> str:
    """Return the key of a line: `occurrence` counts equal lines that are in flight already."""
    digest = blake2b(url.encode() + b"\0" + body, digest_size=16).hexdigest()
    return digest if not occurrence else f"{digest}-{occurrence}"
