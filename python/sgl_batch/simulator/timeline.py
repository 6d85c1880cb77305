"""Owns what a simulated run took, and how busy its ranks were over time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from sgl_batch.planner.pass_cost import PassTime

_MOST_BINS = 512


@dataclass(slots=True)
class Timeline:
    """Running sequences and busy ranks over time, in at most 512 bins of equal length, which double when they are full.

    For each bin:
    running: seconds times the running sequences of all ranks.
    busy: seconds times the share of the ranks' time that is not spent in waiting for the busiest one, or for copies.
    bound: seconds in which memory or products bound.
    """

    bin_s: float = 1e-3
    running: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    bound: list[float] = field(default_factory=list)

    def add(self, start: float, seconds: float, *, running: float, busy: float, bound: float) -> None:
        """Add a span of time in which these are constant."""
        while start + seconds > self.bin_s * _MOST_BINS:
            self._double()
        while seconds > 0:
            index = int(start / self.bin_s)
            part = min(seconds, max((index + 1) * self.bin_s - start, self.bin_s * 1e-9))
            missing = index + 1 - len(self.running)
            for values, value in ((self.running, running), (self.busy, busy), (self.bound, bound)):
                values += [0.0] * missing
                values[index] += part * value
            start, seconds = start + part, seconds - part

    def _double(self) -> None:
        self.bin_s *= 2
        for values in (self.running, self.busy, self.bound):
            values += [0.0] * (len(values) % 2)
            values[:] = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """Return means of each bin: running sequences, and shares from 0 to 1."""
        return {
            "bin_s": self.bin_s,
            "running": [round(value / self.bin_s, 2) for value in self.running],
            "busy": [round(value / self.bin_s, 4) for value in self.busy],
            "bound": [round(value / self.bin_s, 4) for value in self.bound],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Partitioned:
    """That the last sequences were partitioned: when, how many there were, and over sets of how many ranks."""

    at_s: float
    sequences: int
    ranks: int


@dataclass(slots=True, kw_only=True)
class Account:
    """Seconds of a run by part and by what bounds them. `rows`: decoded sequences of all steps and ranks together.

    `idle`: seconds times the share of ranks that waited for the busiest one, or for copies.
    `partitioned`: None if no sequence was.
    """

    seconds: float = 0.0
    prefill_s: float = 0.0
    idle: float = 0.0
    steps: int = 0
    groups: int = 0
    rows: int = 0
    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    bounds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    timeline: Timeline = field(default_factory=Timeline)
    partitioned: Partitioned | None = None

    def add(
        self, time: PassTime, *, times: int = 1, running: int = 0, busy: float = 1.0, prefill: bool = False
    ) -> float:
        """Add a pass that comes `times` times, while so many sequences run.

        `busy`: the mean of the ranks' work over that of the busiest one.

        Returns its seconds, all times together.
        """
        seconds = times * time.seconds
        bound = (time.bounds.get("compute", 0.0) + time.bounds.get("memory", 0.0)) / max(time.seconds, 1e-12)
        self.timeline.add(self.seconds, seconds, running=running, busy=busy, bound=min(bound, 1.0))
        self.seconds += seconds
        self.idle += seconds * (1 - busy)
        self.prefill_s += seconds if prefill else 0.0
        for mine, its in ((self.parts, time.parts), (self.bounds, time.bounds)):
            for name, value in its.items():
                mine[name] += times * value
        return seconds

    def wait(self, seconds: float, part: str) -> None:
        """Add time in which no rank computes."""
        self.timeline.add(self.seconds, seconds, running=0.0, busy=0.0, bound=0.0)
        self.seconds += seconds
        self.idle += seconds
        self.parts[part] += seconds
        self.bounds["copies" if part == "copies" else "nothing to do"] += seconds
