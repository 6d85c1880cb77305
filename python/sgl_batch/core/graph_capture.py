"""Decides which shapes of a decode step's halves run as captured graphs, and for how many rows. Pure bookkeeping."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

# A capture costs about as much as a few passes that launch every kernel, and a shape met as often is likely to come
# again: group sizes change at boundaries, tens of steps apart.
MEETINGS = 4
_STEPS_TO_DOUBLE = 4


def captured_rows(num_rows: int, most: int) -> int:
    """The least size of a capture that holds `num_rows`; at most `most`, which holds them too.

    Powers of two, and three sizes between two of them from 8 on: a quarter of the rows is padding at most.
    """
    assert 0 < num_rows <= most, f"{num_rows} rows where 1 to {most} can be"
    double = 1 << (num_rows - 1).bit_length()
    step = max(double // (2 * _STEPS_TO_DOUBLE), 1) if double > 8 else double
    return min(-(-num_rows // step) * step, most)


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfShape:
    """One half (`attention` or `experts`) of any layer, for rows [start, start + rows) of a group, padding included."""

    half: str
    start: int
    rows: int


def padded_shapes(half: str, spans: list[tuple[int, int]], padded: int) -> list[HalfShape]:
    """A half's shapes for rows `spans` of a group, of which the last goes on to row `padded`."""
    ends = [end for _, end in spans[:-1]] + [padded]
    return [HalfShape(half=half, start=start, rows=end - start) for (start, _), end in zip(spans, ends, strict=True)]


def graph_budget(
    asked_bytes: int, *, device_captures: bool, num_ranks: int, streamed_weights: bool, choices_told: bool
) -> int:
    """Device memory for graphs of halves: what is asked for, or 0 where they cannot be.

    `device_captures`: there is a GPU whose graphs nobody has switched off. A graph could not fetch weights or wait for
    other ranks, and would tell the choice of experts of the pass in which it was captured.
    """
    usable = device_captures and num_ranks == 1 and not streamed_weights and not choices_told
    return asked_bytes if usable else 0


class Captures:
    """Which shapes are captured, within `budget_bytes` (0: none). A shape's layers are captured one by one.

    The budget is full when what was captured has reached it, so that the last capture may go beyond.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes, self._used_bytes = budget_bytes, 0
        self._met: Counter[HalfShape] = Counter()
        self._captured: set[HalfShape] = set()

    @property
    def goes_on(self) -> bool:
        """Whether more may be captured."""
        return self._used_bytes < self._budget_bytes

    def meet(self, shape: HalfShape) -> bool:
        """A pass has this shape: whether graphs run it, captured before or in this pass."""
        self._met[shape] += 1
        return shape in self._captured or (self.goes_on and self._met[shape] >= MEETINGS)

    def add(self, shape: HalfShape, num_bytes: int) -> None:
        """One layer of a shape is captured."""
        self._captured.add(shape)
        self.spend(num_bytes)

    def spend(self, num_bytes: int) -> None:
        """Memory that captures need beside their own."""
        self._used_bytes += num_bytes

    def stop(self) -> None:
        """Nothing more is captured; what is, stays."""
        self._budget_bytes = 0
