"""Decides whether a running engine changes its plan, from what its own passes took (BatchGen 5.4). Pure.

The costs of the profile are scaled by measured / predicted of each part (measured_costs). With these the rest of the
batch is predicted with the present plan, and with others that an engine can take while it runs: the limits of both
phases, whether sub-batches share an expert call, and the interval. Where KV and weights lie stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sgl_batch.config import from_mapping
from sgl_batch.planner.candidate import Candidate
from sgl_batch.planner.candidates import Allowed
from sgl_batch.planner.cost_model import CostModel
from sgl_batch.planner.measured_costs import Measured, cost_factors, predicted_parts, scaled
from sgl_batch.planner.model_layers import ModelLayers
from sgl_batch.planner.pass_cost import PassCost
from sgl_batch.planner.search import MemoryMap, MemoryOf, Planned, predict_candidate, search
from sgl_batch.planner.workload import Workload

# A change must be predicted to save so much of the time that is left.
LEAST_GAIN = 0.05
INTERVAL = "boundary_tokens"
_INTERVALS = (16, 32, 64, 128, 256)
# What a boundary takes is not predicted: of intervals whose times are this close, the longest is taken.
_INTERVAL_EQUAL = 0.02
_OTHERWISE_SHOWN = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBasis:
    """What the plan of an engine's start was chosen from, and the plan.

    Attributes:
        candidate: The plan in force.
        costs: The fitted profile.
        model: The model.
        allowed: What the search at the start could choose; `base` has the interval in force.
        memory: What the plan of the start takes, and the pages of KV that it leaves, which the engine has.
        memory_of: Counts what a candidate takes.
        workload: For what the plan was chosen.
        most_running: Sequences for which the engine has request slots.
        fixed_interval: Whether the user gave the interval.
        most: The largest limits for which the engine has working memory: those of prefill as it began, and those of
            decode too where it reserved memory for them.
    """

    candidate: Candidate
    costs: CostModel
    model: ModelLayers
    allowed: Allowed
    memory: MemoryMap
    memory_of: MemoryOf
    workload: Workload
    most_running: int | None = None
    fixed_interval: bool = False
    most: Mapping[str, int] = field(default_factory=dict)

    @property
    def interval(self) -> int:
        """Return the steps between two boundaries."""
        return self.allowed.base.schedule.boundary_tokens

    @property
    def settings(self) -> dict[str, Any]:
        """Return what a refinement may change, by the names of `BatchConfig`."""
        return {**limits_of(self.candidate), "accumulate": self.candidate.accumulate, INTERVAL: self.interval}

    def changed(self, candidate: Candidate, interval: int) -> PlanBasis:
        """Return the basis with another plan in force."""
        base = from_mapping({**self.allowed.base.flat(), INTERVAL: interval})
        return replace(self, candidate=candidate, allowed=replace(self.allowed, base=base))


@dataclass(frozen=True, slots=True, kw_only=True)
class Refinement:
    """A decision about a running plan.

    Attributes:
        before: The settings in force, as far as they can change.
        changes: The settings that become others, with their new values; none where the plan stays.
        left: How many requests it was decided for.
        before_s, after_s: Predicted seconds of the requests that are left, with the settings in force and with the
            best ones, which may not be good enough for a change.
        factors: By part, how many times as long as the profile says it took.
        search_s: What the decision took.
        basis: What the next refinement is made from.
    """

    before: Mapping[str, Any]
    changes: Mapping[str, Any]
    left: int
    before_s: float
    after_s: float
    factors: Mapping[str, float]
    search_s: float
    basis: PlanBasis = field(repr=False)

    @property
    def gain(self) -> float:
        """Return the share of the time left that the best settings save."""
        return 1 - self.after_s / self.before_s

    @property
    def why(self) -> str:
        """Return the reason in a line, for users and traces."""
        otherwise = [
            f"{name} {factor:.2f}" for name, factor in self.factors.items() if abs(factor - 1) >= _OTHERWISE_SHOWN
        ]
        measured = f"measured / profile: {', '.join(otherwise)}" if otherwise else "the run takes what the profile says"
        if not self.changes:
            best = f"the best other saves {self.gain:.0%}" if self.after_s < self.before_s else "no other is faster"
            return f"{best} of the {self.before_s:,.0f} s that {self.left:,} requests take ({measured})"
        return (
            f"{self.left:,} requests are predicted to take {self.after_s:,.0f} s instead of {self.before_s:,.0f} "
            f"(-{self.gain:.0%}; {measured})"
        )

    @property
    def line(self) -> str:
        """Return the decision in a line: old and new settings, and why."""
        if not self.changes:
            return f"kept: {self.why}"
        shown = ", ".join(f"{name} {self.before[name]} -> {value}" for name, value in self.changes.items())
        return f"refined: {shown}; {self.why}"

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON for a manifest."""
        return {
            "before": dict(self.before),
            "changes": dict(self.changes),
            "requests_left": self.left,
            "predicted_s": {"before": round(self.before_s, 3), "after": round(self.after_s, 3)},
            "measured_over_profile": {name: round(factor, 3) for name, factor in self.factors.items()},
            "search_s": round(self.search_s, 3),
        }


def refine(basis: PlanBasis, measured: Measured, left: Workload, clock: Callable[[], float]) -> Refinement | None:
    """Decide whether the plan changes for the requests that are left. Takes up to seconds of computation.

    Args:
        basis: The plan in force, and what it was chosen from.
        measured: What passes took under this plan.
        left: The requests that are not done.
        clock: Seconds, for `search_s`.

    Returns:
        The decision; None where nothing can be predicted: nothing was measured, or no candidate fits.
    """
    began, now = clock(), basis.candidate
    if measured.seconds <= 0 or not measured.steps:
        return None
    cost = PassCost(basis.costs, basis.model, now, cores=basis.allowed.cores)
    factors = cost_factors(measured, predicted_parts(measured, cost))
    costs = scaled(basis.costs, factors)
    found = _Search(basis, costs, left)
    before_s = found.seconds(now, basis.interval)
    best = found.best()
    if before_s is None or best is None:
        return None
    candidate, interval, after_s = best
    changed = basis.changed(candidate, interval)
    free = {name: value for name, value in changed.settings.items() if name not in basis.allowed.pinned}
    changes = {name: value for name, value in free.items() if value != basis.settings[name]}
    if after_s > (1 - LEAST_GAIN) * before_s:
        changes = {}
    return Refinement(
        before=basis.settings,
        changes=changes,
        left=left.count,
        before_s=before_s,
        after_s=after_s,
        factors=factors,
        search_s=clock() - began,
        basis=changed if changes else basis,
    )


class _Search:
    """The search of one refinement, with the costs as measured."""

    def __init__(self, basis: PlanBasis, costs: CostModel, left: Workload) -> None:
        self._basis, self._costs, self._left = basis, costs, left
        now, allowed = basis.candidate, basis.allowed
        most = allowed.most_running if basis.most_running is None else basis.most_running
        self._allowed = replace(
            allowed,
            kv=(now.kv,),
            weights=(now.weights,),
            most_running=min(allowed.most_running, most),
            most=basis.most,
        )

    def best(self) -> tuple[Candidate, int, float] | None:
        """Return the best limits with the best interval, and their predicted seconds; None where nothing fits."""
        basis = self._basis
        ranked = search(self._left, self._costs, basis.model, self._allowed, self._memory_of, quick=True).ranked
        if not ranked:
            return None
        first: Planned = ranked[0]
        timed: dict[int, float] = {}
        for interval in (basis.interval, *(() if basis.fixed_interval else _INTERVALS)):
            timed[interval] = self.seconds(first.candidate, interval) or math.inf
        near = [
            interval for interval, seconds in timed.items() if seconds <= (1 + _INTERVAL_EQUAL) * min(timed.values())
        ]
        interval = basis.interval if basis.interval in near else max(near)
        return first.candidate, interval, timed[interval]

    def seconds(self, candidate: Candidate, interval: int) -> float | None:
        """Return the predicted seconds of a candidate with an interval."""
        basis = self._basis
        allowed = basis.changed(candidate, interval).allowed
        prediction = predict_candidate(candidate, self._left, self._costs, basis.model, allowed, basis.memory)
        return None if prediction is None else prediction.seconds

    def _memory_of(self, candidate: Candidate) -> MemoryMap:
        """Return the pages of KV that the engine has, and what a candidate lacks beside them.

        On a CPU without a budget nothing was counted for decode groups, which take little beside those of prefill.
        """
        basis = self._basis
        found = basis.memory_of(candidate)
        lacks = found.lacks
        if not basis.allowed.cores and found.taken > basis.memory.taken:
            lacks = lacks or "it takes more of the GPU than the plan for which the pages of KV were counted"
        return replace(found, room=basis.memory.room, lacks=lacks)


def limits_of(candidate: Candidate) -> dict[str, int]:
    """Return the limits of both phases, by the names of `BatchConfig`."""
    return {
        "b_attn_prefill": candidate.b_attn_prefill,
        "b_moe_prefill": candidate.b_moe_prefill,
        "b_attn_decode": candidate.b_attn_decode,
        "b_moe_decode": candidate.b_moe_decode,
    }


def limits_with_memory(candidate: Candidate, *, reserved: bool) -> dict[str, int]:
    """Return the largest limits for an engine that starts with this candidate, as `PlanBasis.most`."""
    return {name: size for name, size in limits_of(candidate).items() if reserved or name.endswith("prefill")}
