"""Owns the measures of a run: exclusive time by part, and counts of groups, calls and rows."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from sgl_batch.metrics.sampled_parts import SampledParts

# `idle` is the time without work: no request, or a pause. `other` is the start, scheduling and all that no part names.
# Of several ranks: `exchange` and `agreement` (before each step) are their own cost if the wait for other ranks can be
# separated, which is `stall`; `boundary` is the boundary actions and moves, with their waits. `weights` is the wait for
# weights that are read while the model runs. The MLPs of a dense model count as `experts`.
PARTS = (
    "attention",
    "router",
    "experts",
    "exchange",
    "agreement",
    "stall",
    "boundary",
    "copies",
    "weights",
    "sampling",
    "idle",
    "other",
)


class PartClock:
    """Wall time by part in seconds, exclusive: time in an inner part does not count to the outer one.

    It is the host's time. With a `device` that computes on its own, parts inside forward passes are the device's time,
    estimated from samples, and `other` is the rest of the wall time. Until a late sample is read, its time is in
    `other`.
    """

    def __init__(self, device: SampledParts | None = None) -> None:
        self.part_s: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._stack: list[str] = ["other"]
        self._since = self._begun = time.perf_counter()
        self._device, self._in_pass = device, False
        self._reported: dict[str, float] = dict.fromkeys(PARTS, 0.0)

    def _switch(self) -> None:
        now = time.perf_counter()
        if not self._in_pass:
            self.part_s[self._stack[-1]] += now - self._since
        self._since = now

    @property
    def measures_parts(self) -> bool:
        """Whether the current pass is measured by part on the device. It may not replay a graph, which has no parts."""
        return self._device is not None and self._device.by_part

    @contextmanager
    def device_pass(self, kind: str) -> Iterator[None]:
        """Inside, a forward pass or the sampling after it runs: its time is the device's, if there is one.

        `kind`: as in sampled_parts.
        """
        if self._device is None:
            yield
            return
        self._switch()
        self._in_pass = True
        try:
            with self._device.measured(kind):
                yield
        finally:
            self._switch()
            self._in_pass = False

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside the block to `name`."""
        self._switch()
        self._stack.append(name)
        self._mark()
        try:
            yield
        finally:
            self._switch()
            self._stack.pop()
            self._mark()

    def _mark(self) -> None:
        if self._device is not None:
            self._device.mark(self._stack[-1])

    def spent(self, seconds: float, part: str) -> None:
        """Count `seconds` of the current part, which the caller has measured, to `part`."""
        self.shift(seconds, source=self._stack[-1], target=part)

    def shift(self, seconds: float, *, source: str, target: str) -> None:
        """Move `seconds` of the host's time, which count to `source`, to `target`."""
        if not self._in_pass:
            self.part_s[source] -= seconds
            self.part_s[target] += seconds

    def waited(self, seconds: float) -> None:
        """Move `seconds` of the current part, in which this rank waited for others, to `stall`."""
        self.spent(seconds, "stall")

    def read(self) -> dict[str, float]:
        self._switch()
        if self._device is None:
            return dict(self.part_s)
        self._device.collect()
        now = {part: self.part_s[part] + self._device.part_s[part] for part in PARTS}
        now["other"] = 0.0
        now["other"] = self._since - self._begun - sum(now.values())
        # A late sample moves time out of `other`, but no reported part may decrease.
        self._reported = {part: max(reported, now[part]) for part, reported in self._reported.items()}
        return dict(self._reported)


@dataclass(slots=True)
class Counters:
    """Counts since the start. `expert_rows` are routed rows; `expert_gemms` are experts that had rows in a call."""

    counts: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    tokens_per_expert: torch.Tensor | None = None
    clock: PartClock = field(default_factory=PartClock)
    _later: list[torch.Tensor] | None = None

    def add(self, name: str, amount: int = 1) -> None:
        self.counts[name] += amount

    def add_expert_call(self, rows_per_expert: torch.Tensor) -> None:
        """Count one combined expert call; `rows_per_expert`: [E]."""
        if self._later is not None:
            self._later.append(rows_per_expert)
            return
        # numpy's operations on so few numbers take a fraction of torch's time, in every layer of every step.
        rows = rows_per_expert.numpy(force=True)
        self.add("expert_calls")
        self.add("expert_rows", int(rows.sum()))
        self.add("expert_gemms", int(np.count_nonzero(rows)))
        if self.tokens_per_expert is None:
            self.tokens_per_expert = torch.zeros_like(rows_per_expert)
        self.tokens_per_expert += rows_per_expert

    @contextmanager
    def counting_later(self) -> Iterator[list[torch.Tensor]]:
        """Inside, expert calls are not counted: what `add_expert_call` would take for each is in the list."""
        self._later = []
        try:
            yield self._later
        finally:
            self._later = None

    @contextmanager
    def uncounted(self, names: Collection[str] = ()) -> Iterator[None]:
        """Inside, only the counts in `names` change, and the host's time counts to `other`."""
        counts, per_expert, part_s = dict(self.counts), self.tokens_per_expert, dict(self.clock.part_s)
        self.tokens_per_expert = None
        try:
            yield
        finally:
            kept = {name: self.counts[name] for name in names if name in self.counts}
            self.counts.clear()
            self.counts.update({**counts, **kept})
            self.tokens_per_expert = per_expert
            for part in PARTS[:-1]:
                self.clock.shift(self.clock.part_s[part] - part_s[part], source=part, target="other")

    def as_dict(self) -> dict[str, object]:
        per_expert = self.tokens_per_expert
        return {
            "part_s": self.clock.read(),
            "counters": dict(self.counts),
            "tokens_per_expert": [] if per_expert is None else per_expert.tolist(),
        }
