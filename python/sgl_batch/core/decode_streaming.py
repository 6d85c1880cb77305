"""Decides which rows of a decode group have their KV on the device together, where it is brought there by layer and
sub-batch, and in which pages; and whether that pays (BatchGen 5.3).

The device's memory is two halves for sub-batches that follow each other, so that one comes while the other is attended.
How the bytes move is the affair of others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

_CLEARLY = 1.5  # times as fast: then the other is not tried again for a group of twice or half the size


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedRow:
    """Where the KV of a row's full pages lies (`store_blocks`), and how many pages it needs behind them."""

    store_blocks: tuple[int, ...]
    own_pages: int


@dataclass(slots=True, kw_only=True, eq=False)
class StreamedPart:
    """Rows [start, end) of a group. `pages`: of each, where in a half its pages lie, own ones one after the other.

    `page_of`: by store block, where its page lies. A full page that several rows have in the same block lies there
    once. A part of more pages than a half has (`large`) takes both halves.
    """

    start: int
    end: int
    large: bool = False
    num_pages: int = 0
    pages: list[list[int]] = field(default_factory=list)
    page_of: dict[int, int] = field(default_factory=dict)


def lay_out(rows: Sequence[StreamedRow], *, half_pages: int, most_rows: int) -> list[StreamedPart]:
    """Cut rows into sub-batches of at most `most_rows`, in their order, each as much as a half holds.

    A row that alone needs more has a sub-batch of its own.
    """
    parts: list[StreamedPart] = []
    for number, row in enumerate(rows):
        part = parts[-1] if parts else None
        full = part is not None and (
            part.end - part.start >= most_rows or part.num_pages + _takes(part, row) > half_pages
        )
        if part is None or full:
            part = StreamedPart(start=number, end=number)
            parts.append(part)
        _append(part, row)
        part.large = part.num_pages > half_pages
    return parts


def _takes(part: StreamedPart, row: StreamedRow) -> int:
    return sum(block not in part.page_of for block in row.store_blocks) + row.own_pages


def _append(part: StreamedPart, row: StreamedRow) -> None:
    pages = []
    for block in row.store_blocks:
        if block not in part.page_of:
            part.page_of[block] = part.num_pages
            part.num_pages += 1
        pages.append(part.page_of[block])
    pages += range(part.num_pages, part.num_pages + row.own_pages)
    part.num_pages += row.own_pages
    part.pages.append(pages)
    part.end += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One sub-batch in one layer. Turns are numbered layer by layer; `half`: which one it begins in, 0 or 1.

    `frees`: the turns before it whose pages it takes; `then`: those that may begin to come when it has been attended.
    """

    layer: int
    index: int
    half: int
    frees: tuple[int, ...]
    then: tuple[int, ...]


def take_turns(parts: Sequence[StreamedPart], layers: int) -> list[Turn]:
    """The turns of a forward pass. The first, and the second where it takes other pages, come before any is attended.

    A turn comes one turn early, to the half that is not attended meanwhile, or, where one of both is large, when the
    one before it has been attended.
    """
    large = [part.large for part in parts] * layers
    halves = [0 if is_large else number % 2 for number, is_large in enumerate(large)]
    begun = [
        number - 1 if number and (large[number] or large[number - 1]) else number - 2 for number in range(len(large))
    ]
    return [
        Turn(
            layer=number // len(parts),
            index=number % len(parts),
            half=halves[number],
            frees=tuple(other for other in (number - 2, number - 1) if 0 <= other <= begun[number]),
            then=tuple(other for other in (number + 1, number + 2) if other < len(large) and begun[other] == number),
        )
        for number in range(len(large))
    ]


def first_turns(turns: Sequence[Turn]) -> list[int]:
    """Those that come before any is attended."""
    later = {number for turn in turns for number in turn.then}
    return [number for number in range(len(turns)) if number not in later]


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
