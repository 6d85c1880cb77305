"""Makes simulated instances whose passes cost what a line says, and records what they decide."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from sgl_batch.core.admission_policy import make_admission
from sgl_batch.core.decision_record import Observed
from sgl_batch.core.plan import PhasePlan, Plan
from sgl_batch.core.rank_moves import Migration
from sgl_batch.planner.pass_cost import PassTime
from sgl_batch.simulator.instance import Instance
from sgl_batch.simulator.kv_forms import KVForm, RankPages, make_form
from sgl_batch.simulator.node_pool import NodePool
from sgl_batch.simulator.partition import TailForms
from sgl_batch.simulator.rank import SimulatedRank
from sgl_batch.simulator.requests import Requests
from sgl_batch.simulator.scheduler import Ours, Scheduler
from sgl_batch.simulator.work import PassWork

PAGE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LineCosts:
    """Seconds that grow as a line with each kind of work; `sources` as in `Costs`."""

    fixed_s: float = 1e-3
    row_s: float = 1e-5
    context_s: float = 1e-8
    prompt_s: float = 1e-5
    copy_s: float = 1e-6
    move_s: float = 1e-6
    boundary_s: float = 0.0
    sources: ClassVar[Mapping[str, str]] = {"all": "made up"}

    def of_pass(self, work: PassWork) -> PassTime:
        rows_s = work.rows * self.row_s + work.kv_tokens * self.context_s
        return self._time("compute", self.fixed_s + rows_s + work.prompt_tokens * self.prompt_s)

    def of_copy(self, tokens: float) -> PassTime:
        return self._time("copies", tokens * self.copy_s)

    def of_move(self, tokens: float) -> PassTime:
        return self._time("copies", tokens * self.move_s)

    def of_boundary(self) -> PassTime:
        return self._time("boundary", self.boundary_s)

    @staticmethod
    def _time(name: str, seconds: float) -> PassTime:
        parts = defaultdict(float, {name: seconds})
        return PassTime(parts=parts, bounds=parts.copy(), bottleneck=name)


def plan(*, decode: int = 8, prefill: int = 96, interval: int = 8, mix: int = 0) -> Plan:
    return Plan(
        prefill=PhasePlan(b_attn=64, b_moe=prefill),
        decode=PhasePlan(b_attn=decode, b_moe=decode),
        page_size=PAGE,
        boundary_tokens=interval,
        refill_watermark=0.75,
        ready_target=decode + 4,
        mix_prefill=mix,
    )


def requests(lengths: list[tuple[int, int]], *, spare: int = 0) -> Requests:
    """`spare`: how many more tokens than it will a sequence may generate."""
    both = np.array(lengths, dtype=np.int64).reshape(-1, 2)
    return Requests(prompts=both[:, 0], outputs=both[:, 1], most=both[:, 1] + spare)


def some_lengths(count: int, seed: int = 0, *, longest: int = 80) -> list[tuple[int, int]]:
    draw = np.random.default_rng(seed)
    return [(int(draw.integers(1, longest)), int(draw.integers(1, longest))) for _ in range(count)]


def instance(
    asked: Requests,
    in_force: Plan,
    *,
    form: str = "device",
    ranks: int = 1,
    memory: RankPages | None = None,
    admission: str = "reserve",
    costs: LineCosts | None = None,
    migration: Migration = Migration.EVEN,
    scheduler: Scheduler | None = None,
    pool: NodePool | None = None,
    long_tail: TailForms | None = None,
    numbers: Sequence[int] | None = None,
) -> Instance:
    """`numbers`: of the requests that are queued at the start (default: all)."""
    memory = memory or RankPages(device=60, store=200)
    made = []
    for rank in range(ranks):
        kv: KVForm = make_form(form, memory, in_force.page_size, make_admission(admission, on_cpu=True))
        own = (range(len(asked)) if numbers is None else numbers)[rank::ranks]
        made.append(SimulatedRank(asked, own, in_force, kv, request_slots=64))
    decides = scheduler or Ours(made[0].form.policy)
    return Instance(made, in_force, decides, costs or LineCosts(), migration=migration, pool=pool, long_tail=long_tail)


class Recorded:
    """Ours, which writes each decision down as the engine's trace does."""

    is_local = False

    def __init__(self, form: str) -> None:
        self._form, self._ours = form, None
        self.events: list[dict[str, Any]] = []

    def next(self, state, kv, in_force):
        if self._ours is None:
            self._ours = Ours(make_form(self._form, RankPages(device=1, store=1), PAGE).policy)
        observed = Observed(state, kv)
        actions = self._ours.next(observed.state, observed.kv, in_force)
        record = observed.record(in_force, self._ours.policy.name, actions)
        self.events.append(json.loads(json.dumps({"engine": 0, "rank": 0, **record})))
        return actions

    def meet(self, ranks):
        return False
