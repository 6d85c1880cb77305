"""Adds the statistics of instances, and of the engines of one instance that followed each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from sgl_batch.core.answers import EngineStats

Number = TypeVar("Number", int, float)


class InstanceStats:
    """The statistics of one instance over all of its engines: each counts from 0."""

    def __init__(self) -> None:
        self._before, self._last, self._restarts = EngineStats(), EngineStats(), -1

    def see(self, stats: EngineStats, restarts: int) -> None:
        """Take a reading. `restarts`: which engine it is of; one of an engine that others followed comes too late."""
        if restarts < self._restarts:
            return
        if restarts != self._restarts:
            self._before, self._restarts = self.ended(), restarts
        self._last = stats

    def ended(self) -> EngineStats:
        """Return what stays of an instance that has gone: its counts, and no sequences."""
        total = self.total()
        return EngineStats(counters=total.counters, part_s=total.part_s, tokens_per_expert=total.tokens_per_expert)

    @property
    def queued(self) -> int:
        """The sequences that the last engine had not begun at its last reading."""
        return self._last.sequences.get("QUEUED", 0)

    def total(self) -> EngineStats:
        """Return the statistics since the instance started."""
        return summed((self._before, self._last))


def summed(parts: Iterable[EngineStats]) -> EngineStats:
    """Return the statistics of several engines together; memory is that of the one with the most."""
    found = list(parts)
    return EngineStats(
        counters=_added(one.counters for one in found),
        part_s=_added(one.part_s for one in found),
        tokens_per_expert=_added_by_place([one.tokens_per_expert for one in found]),
        sequences=_added(one.sequences for one in found),
        peak_memory_bytes=max((one.peak_memory_bytes for one in found), default=0),
        memory_budget_bytes=max((one.memory_budget_bytes for one in found), default=0),
        paused=any(one.paused for one in found),
        forward=next((one.forward for one in found if one.forward), ""),
        overflow_directory=next((one.overflow_directory for one in found if one.overflow_directory), ""),
    )


def _added(parts: Iterable[Mapping[str, Number]]) -> dict[str, Number]:
    total: dict[str, Number] = {}
    for one in parts:
        for name, number in one.items():
            total[name] = total[name] + number if name in total else number
    return total


def _added_by_place(parts: Sequence[Sequence[int]]) -> Sequence[int]:
    filled = [one for one in parts if len(one)]
    return tuple(sum(numbers) for numbers in zip(*filled, strict=True))
