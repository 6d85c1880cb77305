"""Owns the form of a module's seconds by rows: a roofline of bytes and operations, divided by an efficiency.

The roofline has two parameters, the most bytes and the most operations a second that the module reached anywhere; its
two times are added, so that it has no corner, and an efficiency above 1 says that they overlap (BatchGen 5.4). The
efficiency depends on the rows and is read off between the sizes that are known, on logarithmic axes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

# What bounds a piece of work. Overhead: all that bytes and operations at the best rates do not explain.
MEMORY, COMPUTE, OVERHEAD = "memory", "compute", "fixed overhead"
TINY_S = 1e-9
Count = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Knots:
    """A positive function on logarithmic axes: straight between knots in ascending order, constant outside of them."""

    points: tuple[tuple[float, float], ...]
    _xs: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _logs: tuple[tuple[float, float], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_xs", tuple(x for x, _ in self.points))
        object.__setattr__(self, "_logs", tuple((math.log(x), math.log(y or TINY_S)) for x, y in self.points))

    def at(self, rows: float) -> float:
        """Return the function's value."""
        behind = bisect_left(self._xs, rows)
        if behind == 0 or behind == len(self._xs):
            return self.points[min(behind, len(self._xs) - 1)][1]
        (x0, y0), (x1, y1) = self._logs[behind - 1], self._logs[behind]
        return math.exp(y0 + (math.log(rows) - x0) / (x1 - x0) * (y1 - y0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Seconds of a module by rows.

    Attributes:
        bytes_of: Bytes that the module reads for so many rows.
        work_of: Its operations for so many rows.
        bandwidth: Bytes a second at most.
        peak: Operations a second at most.
        efficiency: The share of the roofline that is reached, by rows.
        is_counted: Whether bytes and operations are those of the module; else they stand for a fixed time and a time by
            row, and the module counts as overhead.
    """

    bytes_of: Count
    work_of: Count
    bandwidth: float
    peak: float
    efficiency: Knots
    is_counted: bool = True

    def at(self, rows: float) -> float:
        """Return the seconds of the module for so many rows; none for no rows.

        Beyond the largest size that was measured it goes on in a straight line.
        """
        if rows <= 0:
            return 0.0
        largest = self.efficiency.points[-1][0]
        if rows <= largest or len(self.efficiency.points) == 1:
            return self._measured(rows)
        before, last_s = self.efficiency.points[-2][0], self._measured(largest)
        each = (last_s - self._measured(before)) / (largest - before)
        return last_s + min(max(each, 0.0), last_s / largest) * (rows - largest)

    def bounds(self, rows: float) -> dict[str, float]:
        """Return the seconds for so many rows by what bounds them: MEMORY, COMPUTE and OVERHEAD.

        Where the module is faster than its two times together, which then overlap, both shrink alike.
        """
        whole = self.at(rows)
        if not self.is_counted or whole <= 0:
            return {OVERHEAD: whole}
        memory, compute = self.bytes_of(rows) / self.bandwidth, self.work_of(rows) / self.peak
        share = min(1.0, whole / (memory + compute))
        return {MEMORY: share * memory, COMPUTE: share * compute, OVERHEAD: whole - share * (memory + compute)}

    def _measured(self, rows: float) -> float:
        return self._ideal(rows) / self.efficiency.at(rows)

    def _ideal(self, rows: float) -> float:
        return self.bytes_of(rows) / self.bandwidth + self.work_of(rows) / self.peak


def fit_roofline(
    samples: Iterable[tuple[float, float]], bytes_of: Count, work_of: Count, *, is_counted: bool = True
) -> Roofline:
    """Fit (rows, seconds), of which several may have the same rows."""
    seconds: defaultdict[float, list[float]] = defaultdict(list)
    for rows, taken in samples:
        seconds[rows].append(max(taken, TINY_S))
    means = {rows: middle(taken) for rows, taken in sorted(seconds.items())}
    assert means, "a module has samples"
    bandwidth = max(bytes_of(rows) / taken for rows, taken in means.items()) or 1.0
    peak = max(work_of(rows) / taken for rows, taken in means.items()) or 1.0
    ideal = {rows: bytes_of(rows) / bandwidth + work_of(rows) / peak for rows in means}
    efficiency = Knots(tuple((rows, max(ideal[rows], TINY_S) / taken) for rows, taken in means.items()))
    return Roofline(
        bytes_of=bytes_of,
        work_of=work_of,
        bandwidth=bandwidth,
        peak=peak,
        efficiency=efficiency,
        is_counted=is_counted,
    )


def middle(values: Sequence[float]) -> float:
    """Return the median."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
