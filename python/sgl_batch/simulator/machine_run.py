"""Runs a batch on this machine in modelled time: one engine with a plan of the planner, costs by the kept profile."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from sgl_batch.core.admission_policy import make_admission
from sgl_batch.core.plan import Plan
from sgl_batch.core.rank_moves import Migration
from sgl_batch.planner.candidate import DEVICE, EXCLUSIVE, INCLUSIVE, STREAMED, Candidate, flags_of
from sgl_batch.planner.cost_model import CostModel
from sgl_batch.planner.model_layers import ModelLayers
from sgl_batch.planner.pass_cost import PassCost
from sgl_batch.simulator.instance import Instance
from sgl_batch.simulator.kv_forms import RankPages, make_form
from sgl_batch.simulator.machine_costs import MachineCosts
from sgl_batch.simulator.rank import SimulatedRank, Tally
from sgl_batch.simulator.requests import Requests
from sgl_batch.simulator.scheduler import Ours
from sgl_batch.simulator.timeline import Account

_WHERE = {
    DEVICE: "KV on the device",
    INCLUSIVE: "KV in an inclusive store",
    EXCLUSIVE: "KV in an exclusive store",
    STREAMED: "KV streamed from the store",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSetup:
    """An engine on this machine.

    Attributes:
        candidate: Its limits, and where KV lies.
        plan: What the engine makes of them.
        memory: Pages of each rank.
        ranks: How many share the machine.
        request_slots: The most sequences that a rank holds.
        admission: The value of --admission.
        migration: That of --migration.
    """

    candidate: Candidate
    plan: Plan
    memory: RankPages
    ranks: int = 1
    request_slots: int
    admission: str = "auto"
    migration: str = "even"

    @property
    def where(self) -> str:
        """Return where KV lies, in words."""
        return _WHERE[self.candidate.kv]

    def text(self) -> str:
        """Return the setup in words."""
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{ranks}, {self.where}, {' '.join(flags_of(self.candidate.settings))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRun:
    """A run on this machine that was simulated: its account, and the counts of all ranks together."""

    setup: MachineSetup
    account: Account
    counts: Tally

    @property
    def idle(self) -> float:
        """Return the share of the ranks' time in which they wait."""
        return self.account.idle / max(self.account.seconds, 1e-12)


def run_on_machine(
    setup: MachineSetup,
    costs: CostModel,
    model: ModelLayers,
    requests: Requests,
    *,
    cores: int,
    until: float = math.inf,
) -> MachineRun:
    """Run a batch, dealt to the ranks by turns.

    Args:
        setup: The engine.
        costs: The fitted profile.
        model: The model's numbers.
        requests: The batch.
        cores: Of the machine.
        until: Stop at this time, in seconds; `counts.finished` are then the sequences that have ended.
    """
    candidate = setup.candidate
    passes, streamed = (
        PassCost(costs, model, replace(candidate, kv=kv), cores=cores)
        for kv in (DEVICE if candidate.kv == DEVICE else INCLUSIVE, STREAMED)
    )
    seconds = MachineCosts(passes, streamed if candidate.kv == STREAMED else None, setup.ranks)
    ranks = [_rank(setup, requests, number) for number in range(setup.ranks)]
    instance = Instance(
        ranks,
        setup.plan,
        Ours(ranks[0].form.policy),
        seconds,
        first_use=seconds.of_first_use,
        migration=Migration(setup.migration),
    )
    instance.run(until)
    counts = {field.name: sum(getattr(rank.tally, field.name) for rank in ranks) for field in fields(Tally)}
    return MachineRun(setup=setup, account=instance.account, counts=Tally(**counts))


def _rank(setup: MachineSetup, requests: Requests, number: int) -> SimulatedRank:
    kv = setup.candidate.kv
    admission = make_admission(setup.admission, on_cpu=True, exclusive_store=kv == EXCLUSIVE)
    form = make_form(kv, setup.memory, setup.plan.page_size, admission)
    numbers = range(number, len(requests), setup.ranks)
    return SimulatedRank(requests, numbers, setup.plan, form, request_slots=setup.request_slots)
