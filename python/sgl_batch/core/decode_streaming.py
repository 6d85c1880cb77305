"""Decides which rows of a decode group have their KV on the device together, where it is brought there by layer and
sub-batch, and in which pages; and whether that pays (BatchGen 5.3).

Two sub-batches follow each other in different halves of the device's pages, so that one is brought while the other is
attended. How the bytes move is the affair of others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

_CLEARLY = 1.5  # times as fast: then the other is not tried again for a group of twice or half the size


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedRow:
    """Where the KV of a row's full pages lies (`slots`), and how many pages it needs behind them."""

    slots: tuple[int, ...]
    own_pages: int


@dataclass(slots=True, kw_only=True, eq=False)
class StreamedPart:
    """Rows [start, end) of a group. `pages`: of each, the device's page for each of its pages, own ones in sequence.

    Full pages that several rows have in the same slots (`page_of`) have one page. `first`, `last`: what the part uses.
    """

    start: int
    end: int
    first: int
    last: int
    pages: list[list[int]] = field(default_factory=list)
    page_of: dict[int, int] = field(default_factory=dict)

    def overlaps(self, other: StreamedPart) -> bool:
        """Whether both cannot be on the device in one layer."""
        return self.first <= other.last and other.first <= self.last


def lay_out(rows: Seq[StreamedRow], *, total_pages: int, most_rows: int) -> list[StreamedPart]:
    """Cut rows into sub-batches of at most `most_rows`, in their order, each within half the pages 1..total_pages.

    A row that alone takes more than half has a sub-batch of its own, from the first page on.
    """
    half = total_pages // 2
    parts: list[StreamedPart] = []
    for number, row in enumerate(rows):
        part = parts[-1] if parts else None
        if part is None or part.end - part.start >= most_rows or part.last + _takes(part, row) > part.first + half - 1:
            first = 1 + half if part is not None and part.last <= half else 1
            if len(set(row.slots)) + row.own_pages > half:
                first = 1
            part = StreamedPart(start=number, end=number, first=first, last=first - 1)
            parts.append(part)
        _append(part, row)
        assert part.last <= total_pages, f"row {number} takes {part.last} pages of {total_pages}"
    return parts


def _takes(part: StreamedPart, row: StreamedRow) -> int:
    return len({slot for slot in row.slots if slot not in part.page_of}) + row.own_pages


def _append(part: StreamedPart, row: StreamedRow) -> None:
    pages = []
    for slot in row.slots:
        if slot not in part.page_of:
            part.last += 1
            part.page_of[slot] = part.last
        pages.append(part.page_of[slot])
    pages += range(part.last + 1, part.last + 1 + row.own_pages)
    part.last += row.own_pages
    part.pages.append(pages)
    part.end += 1


def bring_order(parts: Seq[StreamedPart], layers: int, *, ahead: int) -> Iterator[tuple[int, ...]]:
    """Turns, numbered layer by layer, that may begin to come: first those before any is attended, then those that may
    begin when the turn 0, 1, ... has been attended. A turn comes at most `ahead` turns early, and never to pages that
    another turn of its layer still needs.
    """
    num_turns, next_turn = layers * len(parts), 0
    for attended in range(-1, num_turns):
        begin = next_turn
        while next_turn < num_turns and next_turn <= attended + ahead and not _meets(next_turn, attended, parts):
            next_turn += 1
        yield tuple(range(begin, next_turn))


def _meets(turn: int, attended: int, parts: Seq[StreamedPart]) -> bool:
    layer, index = divmod(turn, len(parts))
    first = max(attended + 1, layer * len(parts)) - layer * len(parts)
    return any(parts[index].overlaps(parts[earlier]) for earlier in range(first, index))


@dataclass(slots=True, kw_only=True)
class _Rates:
    """Rows a second of groups of about one size; None where not measured."""

    resident: float | None = None
    streamed: float | None = None


class StreamingChoice:
    """Whether the next page of steps is streamed, from what pages of either kind were measured to bring.

    By the number of sequences alive, in powers of two: while they fit the device nothing is streamed. Otherwise both
    ways are measured for one page each, unless one was clearly faster for groups of twice or half the size.
    """

    def __init__(self) -> None:
        self._rates: dict[int, _Rates] = {}

    def note(self, alive: int, *, streamed: bool, rows: int, seconds: float) -> None:
        """A page of steps has computed so many rows."""
        rates = self._rates.setdefault(_size_class(alive), _Rates())
        rate = rows / max(seconds, 1e-9)
        if streamed:
            rates.streamed = rate
        else:
            rates.resident = rate

    def choose(self, alive: int, *, fits: bool) -> bool:
        """Whether to stream the next page for so many sequences, who all have room on the device if `fits`."""
        if fits:
            return False
        size = _size_class(alive)
        own = self._rates.get(size, _Rates())
        if own.resident is not None and own.streamed is not None:
            return own.streamed > own.resident
        for near in (size + 1, size - 1):
            rates = self._rates.get(near, _Rates())
            if rates.resident is None or rates.streamed is None:
                continue
            if rates.streamed > _CLEARLY * rates.resident:
                return True
            if rates.resident > _CLEARLY * rates.streamed:
                return False
        return own.streamed is None


def _size_class(alive: int) -> int:
    return math.frexp(max(alive, 1))[1]
