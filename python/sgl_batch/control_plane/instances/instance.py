"""Owns one instance as its keeper knows it: where it is, which incarnation runs, and what is to become of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

from sgl_batch.control_plane.instances.member import Member
from sgl_batch.control_plane.instances.placement import Place


class Wish(StrEnum):
    """What an instance is to do after it has answered the lines that it has."""

    STAY = "stay"
    """Take no more lines, and keep its engine."""

    MOVE = "move"
    """End, and start again on another node."""

    REMOVE = "remove"
    """End for good."""


@dataclass(slots=True, eq=False, kw_only=True)
class Instance:
    """An instance. `news` is set when anything of the other fields may have changed.

    Attributes:
        name: It stays.
        place: Where it runs or ran last; None before it has had a place.
        holds_place: Whether its place is taken by it now.
        member: The incarnation that runs now; `from_before`: it was started by an earlier server.
        lost: Why the member is gone; None while it lives.
        message: Why there is no member, for people.
        deaths: Incarnations in a row that lived only for a short time.
    """

    name: str
    place: Place | None = None
    holds_place: bool = False
    member: Member | None = None
    from_before: bool = False
    lost: str | None = None
    wish: Wish | None = None
    is_empty: bool = False
    message: str | None = None
    deaths: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)
    life: asyncio.Task[None] | None = None

    @property
    def phase(self) -> str:
        """What it does while it has no member, or in place of what its engine does."""
        if self.member is None:
            return "removing" if self.wish is Wish.REMOVE else "waiting" if not self.holds_place else "starting"
        if self.wish is None:
            return "running"
        return "drained" if self.is_empty else "draining"

    def ask(self, wish: Wish | None) -> None:
        """Change what it is to do."""
        self.wish = wish
        self.news.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """An instance for people: its phase, and why it is not running where that is known. `node` "": none yet."""

    name: str
    incarnation: int
    node: str
    cores: tuple[int, ...]
    gpus: int
    phase: str
    message: str | None
