"""Owns what the server needs of what keeps its engine, or its instances, running, as Protocols."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from starlette.responses import Response

from sgl_batch.api.engine_endpoints import Asked, Endpoints
from sgl_batch.api.engine_view import EngineView
from sgl_batch.api.supervisor import EngineState
from sgl_batch.jobs.line_engine import EngineSource


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRow:
    """An instance for people.

    Attributes:
        incarnation: How often it was started; `restarts`: how often its engine was started again since.
        node: Its name; "" without one.
        cores, gpus: What it has of the node.
        phase: That of its engine, or waiting (for a node), draining, drained or removing; updating while its engine
            gets the weights of the others, outdated where it could not.
        message: Why it is not ready, where that is known.
        in_flight, answered: Lines that it has, and that this incarnation has answered.
        lines_per_s: How fast it answers; 0 where it is not known yet.
    """

    name: str
    incarnation: int
    node: str
    cores: int
    gpus: int
    phase: str
    message: str | None
    restarts: int
    in_flight: int
    answered: int
    lines_per_s: float

    def to_json(self) -> dict[str, Any]:
        """Return the object of the API."""
        return {"id": self.name, "object": "sgl_batch.instance", **asdict(self)}


class InstanceControl(Protocol):
    """The instances of a server. Methods raise RequestError where the caller is wrong."""

    def rows(self) -> list[InstanceRow]:
        """Return all of them."""
        ...

    async def add(self) -> InstanceRow:
        """Begin to start one more."""
        ...

    async def drain(self, name: str) -> InstanceRow:
        """Let one answer what it has, and give it no more lines."""
        ...

    async def remove(self, name: str) -> InstanceRow:
        """Let one answer what it has, then end it for good."""
        ...


class EnginesControl(Protocol):
    """Answers the requests that control an engine, where there are several."""

    async def control(self, path: str, asked: Asked) -> Response:
        """Send a request to all engines, and return one answer for all."""
        ...


class EngineKeeper(EngineSource, Protocol):
    """Keeps an engine running, or several as if they were one. It is the `EngineSource` of the jobs."""

    @property
    def view(self) -> EngineView:
        """What the progress page and the metrics show of it."""
        ...

    @property
    def state(self) -> EngineState:
        """Its state."""
        ...

    @property
    def is_refused(self) -> bool:
        """Whether the engine refuses the command line, so that no start can help."""
        ...

    def endpoints(self) -> Endpoints | None:
        """Return SGLang's endpoints of the engine that is to answer the next request; None while there are none."""
        ...

    @property
    def control(self) -> EnginesControl | None:
        """What answers requests that control an engine, or None where there is one engine, which gets them itself."""
        ...

    @property
    def num_engines(self) -> int:
        """How many engines answer lines; at least 1."""
        ...

    @property
    def instances(self) -> InstanceControl | None:
        """The instances, or None where there is one engine that is the server's own."""
        ...

    def start(self) -> asyncio.Task[None]:
        """Begin to keep it running. The returned task ends when it is given up."""
        ...

    async def stop(self) -> None:
        """End what this server has started."""
        ...
