"""Runs a policy on a deployment over a batch, and adds up what its instances took. `best` finds the deployment.

Instances share nothing: sequences are dealt to them by turns at the start. Where all sequences have equal lengths, the
first instance, which has the most of them, stands for all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from sgl_batch.simulator.cluster.deployment import Deployment
from sgl_batch.simulator.collapsed import Collapsed
from sgl_batch.simulator.instances import make_instance
from sgl_batch.simulator.lengths import are_alike
from sgl_batch.simulator.policies import REQUEST_SLOTS, Choice, Policy, pages
from sgl_batch.simulator.rank import SimulatedRank, Tally
from sgl_batch.simulator.requests import Requests
from sgl_batch.simulator.rivals.disaggregation import Unit, UnitRun, disaggregated
from sgl_batch.simulator.rounds import Rounds
from sgl_batch.simulator.timeline import Account
from sgl_batch.simulator.work import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How many units prefill, and how many decode."""

    prefill: int
    decode: int

    def text(self) -> str:
        """Return the ratio in words."""
        return f"{self.prefill} prefill, {self.decode} decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A policy on a deployment, with its limits. `split`: of units, each of which is an instance of the deployment."""

    policy: Policy
    deployment: Deployment
    choice: Choice
    split: Split | None = None

    def text(self) -> str:
        """Return the setup in words, without the policy and the cluster."""
        units = f" ({self.split.text()})" if self.split else ""
        regime, layout, engine = self.deployment.regime.text(), self.deployment.layout.text(), self.deployment.engine
        of = "" if engine.name == self.policy.engines[0].name else f"{engine.title}: "
        return f"{of}{layout}{units}, {regime}, {self.choice.text()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A simulated run.

    Attributes:
        seconds: Until the last sequence has ended, or until the time at which the run was stopped.
        counts: Of all ranks together (rank.Tally).
        idle: The share of all GPUs' time in which they wait, for other ranks, for copies or for work.
        parts, bounds: Seconds by part, and by what bounds them, of the instance that ends last.
        account: Of that instance.
        simulated, instances: How many were simulated, of how many.
        collapsed: Whether one rank stood for all of an instance.
        rounds: How sequences waited for others; None where all were queued at the start.
    """

    setup: Setup
    seconds: float
    counts: Tally
    idle: float
    parts: Mapping[str, float]
    bounds: Mapping[str, float]
    account: Account
    simulated: int
    instances: int
    collapsed: bool
    rounds: Rounds | None = None

    @property
    def tokens_per_s(self) -> float:
        """Return generated tokens a second of all instances."""
        return self.counts.output_tokens / max(self.seconds, 1e-12)

    @property
    def notes(self) -> list[str]:
        """Return what was left out or simplified, for people."""
        notes = []
        if self.simulated < self.instances:
            notes.append(f"{self.simulated} of {self.instances} instances were simulated; the others are alike")
        if self.rounds is not None:
            notes.append(f"{self.rounds.at_once} problems were worked on at once")
        if self.collapsed:
            notes.append("one rank of each instance was simulated, and the others were taken to be like it")
        return notes


@dataclass(frozen=True, slots=True)
class _Run:
    """An instance that has run: its account, its ranks, and how many instances it stands for, by sequences."""

    account: Account
    ranks: Sequence[SimulatedRank]
    times: float
    copies: int


def simulate(
    setup: Setup,
    requests: Requests,
    *,
    collapse: bool = False,
    until: float = math.inf,
    rounds: Rounds | None = None,
) -> Result:
    """Run a setup over a batch.

    Args:
        setup: The policy, where it runs, and its limits.
        requests: The batch.
        collapse: Simulate one rank of each instance, and take all others to have the same work.
        until: Stop at this time, in seconds; `counts.finished` are then the sequences that have ended.
        rounds: Of which the requests are; None where all are queued at the start. Not with `collapse` or units.
    """
    assert rounds is None or not (collapse or setup.split), "ranks of an instance share the candidates of a round"
    if setup.split is not None:
        return _of_units(setup, setup.split, requests, collapse=collapse)
    deployment = setup.deployment
    count, ranks = deployment.instances, deployment.ranks
    alike = rounds is None and are_alike(requests)
    runs = []
    for index in range(1 if alike else min(count, len(requests))):
        numbers = range(index, len(requests), count)
        queued = () if rounds else numbers
        instance = make_instance(setup.policy, deployment, setup.choice, requests, queued, collapse=collapse)
        if rounds is not None:
            rounds.feed(instance, index, count)
        instance.run(until)
        simulated = len(range(0, len(numbers), ranks)) if collapse else len(numbers)
        times = (len(requests) if alike else len(numbers)) / simulated
        runs.append(_Run(instance.account, instance.ranks, times, count if alike else 1))
    return replace(_result(setup, runs, instances=count, collapsed=collapse and ranks > 1), rounds=rounds)


def _of_units(setup: Setup, split: Split, requests: Requests, *, collapse: bool) -> Result:
    deployment = setup.deployment.for_rows(setup.choice.rows)
    dealt = deployment.ranks
    part = requests.every(dealt) if collapse else requests
    costs: Costs = Collapsed(deployment.costs, dealt) if collapse else deployment.costs
    unit = Unit(ranks=1 if collapse else dealt, pages=pages(deployment.device_tokens), request_slots=REQUEST_SLOTS)
    alike = are_alike(requests)
    first, second = disaggregated(
        part,
        unit,
        setup.choice.plan(),
        costs,
        prefill=split.prefill,
        decode=split.decode,
        alike=alike,
    )
    whole = len(requests) if alike or collapse else None
    runs = _unit_runs(first, whole), _unit_runs(second, whole)
    result = _result(setup, [*runs[0], *runs[1]], instances=split.prefill + split.decode, collapsed=collapse)
    # A sequence that is handed over has ended in a unit of each phase.
    return replace(result, counts=replace(result.counts, finished=_counts(runs[0]).finished))


def _unit_runs(units: Sequence[UnitRun], sequences: int | None) -> list[_Run]:
    """Return the runs of the units of a phase. `sequences`: those of the phase; None if all have run."""
    simulated = sum(rank.tally.finished + rank.tally.refused for unit in units for rank in unit.ranks)
    times = 1.0 if sequences is None else sequences / max(simulated, 1)
    return [_Run(unit.account, unit.ranks, times, unit.stands_for) for unit in units]


def _result(setup: Setup, runs: Sequence[_Run], *, instances: int, collapsed: bool) -> Result:
    last = max((run.account for run in runs), key=lambda account: account.seconds)
    seconds = last.seconds
    busy = sum(run.copies * (run.account.seconds - run.account.idle) for run in runs)
    return Result(
        setup=setup,
        seconds=seconds,
        counts=_counts(runs),
        idle=1 - busy / max(instances * seconds, 1e-12),
        parts=defaultdict(float, last.parts),
        bounds=defaultdict(float, last.bounds),
        account=last,
        simulated=len(runs),
        instances=instances,
        collapsed=collapsed,
    )


def _counts(runs: Sequence[_Run]) -> Tally:
    """Return the counts of all ranks; those of a run that stands for others, as many times."""
    return Tally(
        **{
            field.name: round(sum(run.times * getattr(rank.tally, field.name) for run in runs for rank in run.ranks))
            for field in fields(Tally)
        }
    )
