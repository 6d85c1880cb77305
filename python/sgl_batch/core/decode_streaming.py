"""Decides how streamed decode cuts a group into sub-batches whose KV is on the device together, in which pages the KV
lies, and whether streaming pays (BatchGen 5.3).

The device's memory is two halves for consecutive sub-batches: one is copied in while attention reads the other. The
copies themselves are in kv_offload/.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

# If one way is this many times as fast, the other is not measured for groups of twice or half the size.
_CLEARLY = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedRow:
    """One row of a group: the store blocks of its full pages, and the number of pages that it needs after them."""

    store_blocks: tuple[int, ...]
    own_pages: int


@dataclass(slots=True, kw_only=True, eq=False)
class StreamedPart:
    """A sub-batch: rows [start, end) of a group.

    large: whether it has more pages than a half; it takes both halves then.
    num_pages: its pages in the half.
    pages: by row, the indices of its pages in the half, full pages first, then own pages in a row.
    page_of: by store block, the index of its page. A block that several rows share is in the half once.
    """

    start: int
    end: int
    large: bool = False
    num_pages: int = 0
    pages: list[list[int]] = field(default_factory=list)
    page_of: dict[int, int] = field(default_factory=dict)


def lay_out(rows: Sequence[StreamedRow], *, half_pages: int, most_rows: int) -> list[StreamedPart]:
    """Cut rows, in their order, into sub-batches of at most `most_rows` rows, each as large as a half holds.

    A row that alone needs more pages than a half has a sub-batch of its own.
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
    """One sub-batch in one layer. Turns are numbered layer by layer.

    half: the half in which its pages begin, 0 or 1.
    frees: earlier turns whose pages it takes.
    then: turns whose copies may begin when attention of this one is done.
    """

    layer: int
    index: int
    half: int
    frees: tuple[int, ...]
    then: tuple[int, ...]


def take_turns(parts: Sequence[StreamedPart], layers: int) -> list[Turn]:
    """Return the turns of a forward pass.

    The KV of a turn is copied in during the turn before it, to the half that attention does not read meanwhile. If one
    of the two is large, the copy begins when attention of the turn before is done.
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
    """Return the turns whose copies begin before any attention: the first, and the second if it takes other pages."""
    later = {number for turn in turns for number in turn.then}
    return [number for number in range(len(turns)) if number not in later]


@dataclass(slots=True, kw_only=True)
class _Rates:
    """Rows decoded per second by groups of about one size; None if not measured."""

    resident: float | None = None
    streamed: float | None = None


class StreamingChoice:
    """Decides whether the next interval is streamed, from the measured rates of intervals of either kind.

    Rates are kept by the number of sequences alive, in powers of two. While all sequences fit the device, nothing is
    streamed. Otherwise both ways are measured for one interval each, unless one was clearly faster for groups of twice
    or half the size.
    """

    def __init__(self) -> None:
        self._rates: dict[int, _Rates] = {}

    def note(self, alive: int, *, streamed: bool, rows: int, seconds: float) -> None:
        """Note that an interval has decoded `rows` rows in `seconds`."""
        rates = self._rates.setdefault(_size_class(alive), _Rates())
        rate = rows / max(seconds, 1e-9)
        if streamed:
            rates.streamed = rate
        else:
            rates.resident = rate

    def choose(self, alive: int, *, fits: bool) -> bool:
        """Return whether to stream the next interval. `fits`: whether all `alive` sequences have room on the device."""
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
