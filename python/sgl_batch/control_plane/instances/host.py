"""Owns what a keeper of instances needs of others, as Protocols: what starts members, and the pool of their lines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from sgl_batch.control_plane.instances.member import Member
from sgl_batch.control_plane.instances.placement import Node, Place
from sgl_batch.control_plane.instances.records import Known
from sgl_batch.errors import SglBatchError


class HostError(SglBatchError):
    """What starts members does not answer. It may be asked again."""


class HostEndedError(SglBatchError):
    """What starts members has ended, and does not come back."""


class NotStartedError(SglBatchError):
    """A member could not be started; the message says why. It may be tried again."""


class Host(Protocol):
    """What starts and ends members. Its methods are called on one event loop."""

    async def nodes(self) -> list[Node]:
        """Return the living nodes on which instances can run. Raises HostError, HostEndedError."""
        ...

    async def start(self, name: str, incarnation: int, place: Place) -> Member:
        """Start an incarnation. It returns when it has its place. Raises NotStartedError."""
        ...

    async def find(self, name: str, known: Known) -> Member | None:
        """Return an incarnation that an earlier process has started, or None where it has ended. Raises HostError."""
        ...

    async def end(self, name: str, incarnation: int) -> None:
        """End an incarnation, and free its place. Idempotent."""
        ...

    async def forget(self, name: str, place: Place) -> None:
        """Remove what an instance that has ended has left on its node, as far as that can be reached."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCalls:
    """What the keeper tells the pool of lines.

    `joined`: of a member, and whether an earlier server has started it. `left`: of one that is to get no more lines,
    and why. `draining`: returns when a member has no more lines.
    """

    joined: Callable[[Member, bool], None]
    left: Callable[[Member, str], None]
    draining: Callable[[Member], Awaitable[None]]
