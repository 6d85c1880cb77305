"""Owns what the pool needs of one instance, as a Protocol; `ray_actor` and `ray_member` give it over Ray."""

from __future__ import annotations

from typing import Protocol

from sgl_batch.control_plane.instances.http_messages import Control, Controlled, HttpMore, HttpPart, HttpRequest
from sgl_batch.control_plane.instances.messages import Lot, Poll, Reading, Report
from sgl_batch.control_plane.instances.service_state import ServiceState
from sgl_batch.errors import SglBatchError


class MemberLostError(SglBatchError):
    """The instance is gone for good: its process or its node has ended. No line of it is to blame."""


class Member(Protocol):
    """One incarnation of one instance, seen from the pool. All methods raise MemberLostError once it is gone.

    Attributes:
        name: Of the instance; it stays when another incarnation replaces this one.
        incarnation: Counts its incarnations.
        node: Where it runs, for people.
    """

    name: str
    incarnation: int
    node: str

    async def submit(self, lot: Lot) -> bool:
        """Give it lines. Returns False where no engine is ready: then it has taken none.

        A line whose key it has already, in its engine or among the answers, is not computed again.
        """
        ...

    async def poll(self, poll: Poll) -> Report:
        """Return what is new."""
        ...

    async def take_back(self, count: int, among: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Take back up to so many lines that its engine has not begun, the last ones first. Returns their keys.

        `among`: take back these, begun or not.

        It gives no answer to them any more, unless it has one already: then their keys are not returned.
        """
        ...

    async def cancel(self, keys: tuple[str, ...]) -> None:
        """Abort lines whose answers are not wanted any more."""
        ...

    async def known(self) -> tuple[str, ...]:
        """Return the keys of the lines that its engine computes now."""
        ...

    async def stats(self) -> Reading:
        """Read the statistics of its engine now; those of reports are up to some seconds old."""
        ...

    async def adopt(self, state: ServiceState) -> None:
        """Give each of its engines this state before it takes lines: the one that it has now, and later ones."""
        ...

    async def control(self, control: Control) -> Controlled:
        """Send its engine a request that controls it, and return the whole answer."""
        ...

    async def http(self, request: HttpRequest) -> HttpPart:
        """Send its engine another request, and return the first part of the answer."""
        ...

    async def http_more(self, asked: HttpMore) -> HttpPart:
        """Return another part of an answer."""
        ...

    async def http_end(self, call: str) -> None:
        """Abort a request, or forget one whose answer is read."""
        ...

    async def stop(self) -> None:
        """End its engine and its process. It keeps the answers that were not acknowledged on its disk."""
        ...
