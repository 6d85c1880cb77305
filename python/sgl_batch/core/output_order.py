"""Owns the order in which parts of answers are read: a part waits until all tokens before its own are there.

A sequence that moves goes on sending where it is, over another connection. Nothing orders messages of two connections:
under load one of the target's can overtake the last one of the source, whose tokens would then be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Message = TypeVar("Message")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tokens [start, end) of the answer to one request; `is_last`: no more follow."""

    request_id: str
    start: int
    end: int
    is_last: bool


class OutputOrder(Generic[Message]):
    """Messages, each with parts of some answers, from several senders. One sender's messages come in order."""

    def __init__(self) -> None:
        self._ends: dict[str, int] = {}
        self._waiting: list[tuple[Message, Sequence[Part]]] = []

    def take(self, message: Message, parts: Sequence[Part]) -> list[Message]:
        """Add a message; return those that can be read now, in order. A message without parts can be at once."""
        self._waiting.append((message, parts))
        ready = []
        while (found := self._first_that_follows()) is not None:
            message, parts = self._waiting.pop(found)
            self._note(parts)
            ready.append(message)
        return ready

    def _first_that_follows(self) -> int | None:
        for number, (_, parts) in enumerate(self._waiting):
            if all(part.start <= self._ends.get(part.request_id, 0) for part in parts):
                return number
        return None

    def _note(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.is_last:
                self._ends.pop(part.request_id, None)
            else:
                self._ends[part.request_id] = max(part.end, self._ends.get(part.request_id, 0))
