"""Measures the host's work between passes: sequences change their states, and core/ decides. No KV is moved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from primitive_costs.timing import Cost, sample
from sgl_batch.config import BatchConfig, ForwardConfig
from sgl_batch.core.coroutine import Event
from sgl_batch.core.decide import decide
from sgl_batch.core.kv_policy import DeviceOnly
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_boundary import State
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.plan import Plan, make_plan
from sgl_batch.core.primitives import combine
from sgl_batch.core.rank_agreement import decide_group
from sgl_batch.core.rank_moves import Migration, plan_moves
from sgl_batch.core.rank_state import Movable, RankState
from sgl_batch.core.residency import decide_residency, pages_to_run
from sgl_batch.core.resident_prompts import ResidentPrompts
from sgl_batch.core.sequence import SequenceState, Status
from sgl_batch.managers.sequence_table import SequenceTable
from sgl_batch.managers.trace import TraceWriter
from sgl_batch.metrics.counters import Counters

_PAGE_SIZE = 64
_OUTPUT_LEN = 4096
_NUM_RANKS = 8
_NO_PROMPT: tuple[str, ...] = ()


class _NothingShared:
    """Return the SharedPrompts of prompts that begin differently."""

    def leave(self, request_id: str) -> int:
        return 0


def plan_for(batch: int) -> Plan:
    """Return the plan of a decode group of this many sequences."""
    config = BatchConfig(forward=ForwardConfig(b_moe_decode=batch, b_attn_decode=min(256, batch)))
    return make_plan(config, page_size=_PAGE_SIZE, max_running=2 * batch)


def sequences_of(count: int, context: int, *, status: Status, first: int = 0) -> list[SequenceState]:
    """Return sequences with `context` tokens of KV, half of them generated."""
    return [
        SequenceState(
            sequence_id=f"s{number}",
            arrival=number,
            prompt_tokens=max(1, context // 2),
            max_new_tokens=_OUTPUT_LEN,
            status=status,
            generated_tokens=context // 2 + number % 7,
            waits_since=number,
        )
        for number in range(first, first + count)
    ]


def measure(*, batch: int, context: int, rounds: int) -> list[Cost]:
    """Measure every decision and state change for a decode group of `batch`, with as many sequences waiting."""
    return [*_states(batch, context, rounds), *_boundary(batch, context, rounds), *_ranks(batch, context, rounds)]


def _states(batch: int, context: int, rounds: int) -> list[Cost]:
    table = SequenceTable(PageLedger(1 << 30, _PAGE_SIZE), _NothingShared(), Counters(), TraceWriter(None))
    names = [f"s{number}" for number in range(batch)]
    for name in names:
        table.enter(_request(name, context))
    sequences = [table[name] for name in names]
    table.record(combine(sequences, Event.COMBINE_PREFILL, "the benchmark begins"))
    table.record([table.prefilled(name) for name in names])

    def resume() -> None:
        table.record(combine(table.ready_named(names), Event.COMBINE_DECODE, "refill"))
        for name in names:
            table.take_ready(name)

    def yield_all() -> None:
        table.record([table.suspended(name, "pages of the device lack") for name in names])

    resumed = sample(resume, rounds=rounds, prepare=lambda: yield_all() if table.is_running(names[0]) else None)
    yielded = sample(yield_all, rounds=rounds, prepare=lambda: None if table.is_running(names[0]) else resume())
    unit = f"{batch} sequences"
    return [
        Cost(category="yield, between passes", operation="states and queue of sequences", unit=unit, samples_s=yielded),
        Cost(category="combine, without KV", operation="states and queue of sequences", unit=unit, samples_s=resumed),
    ]


def _request(name: str, context: int) -> Any:
    """Make a request with the attributes that a sequence table reads."""
    return SimpleNamespace(
        rid=name,
        origin_input_ids=[0] * max(1, context // 2),
        output_ids=[],
        sampling_params=SimpleNamespace(max_new_tokens=_OUTPUT_LEN),
        extra_key=None,
        to_finish=None,
        return_logprob=False,
        return_routed_experts=False,
    )


def _boundary(batch: int, context: int, rounds: int) -> list[Cost]:
    plan = plan_for(batch)
    running = sequences_of(batch, context, status=Status.RUNNING)
    waiting = sequences_of(batch, context, status=Status.SUSPENDED, first=batch)
    size = PageLedger(1, _PAGE_SIZE)
    pages = sum(pages_to_run(sequence, size, plan) for sequence in running)
    tight = PageLedger(pages * 3 // 4, _PAGE_SIZE)
    for sequence in running:
        tight.reserve(sequence.sequence_id, max(1, pages // batch // 2))
    prompts = ResidentPrompts[str]()
    state = _state(batch // 2, ready=sequences_of(batch, context, status=Status.READY, first=batch), plan=plan)

    kv = KVState(device=tight, admission=tight, runners=lambda: running, estimate_shared=lambda _: None)

    def residency() -> None:
        decide_residency(running, waiting, tight, plan, prompts=prompts, pages_of=lambda _: _NO_PROMPT)

    def step() -> None:
        decide(state, kv, plan, DeviceOnly())

    every = 1 / plan.boundary_tokens
    return [
        Cost(
            category="scheduling at a boundary",
            operation="what comes next, without a store",
            unit=f"{batch // 2} running, {batch} ready",
            samples_s=sample(step, rounds=rounds),
            per_step=every,
        ),
        Cost(
            category="scheduling at a boundary",
            operation="who keeps pages, who is suspended and who comes back, with a store",
            unit=f"{batch} running, {batch} waiting",
            samples_s=sample(residency, rounds=rounds),
            per_step=every,
        ),
    ]


def _state(running: int, *, ready: list[SequenceState], plan: Plan) -> State:
    return State(
        queued=(),
        ready=ready,
        running=running,
        steps=plan.boundary_tokens,
        request_slots=4 * plan.decode.b_moe,
        free_request_slots=2 * plan.decode.b_moe,
        filling=False,
    )


def _ranks(batch: int, context: int, rounds: int) -> list[Cost]:
    """Measure spreading one rank's sequences over idle ranks: the only partition, data-parallel, of a tail."""
    plan = plan_for(batch)
    own = sequences_of(batch, context, status=Status.RUNNING)
    pages = -(-(context + _OUTPUT_LEN) // _PAGE_SIZE)
    movable = [Movable(sequence=sequence, tokens=context, pages=pages) for sequence in own]
    total = 2 * batch * pages

    def rank(running: list[Movable]) -> RankState:
        return RankState(
            state=_state(len(running), ready=[], plan=plan),
            total_pages=total,
            free_pages=total - len(running) * pages,
            running=running,
        )

    tail = [rank(movable), *(rank([]) for _ in range(_NUM_RANKS - 1))]
    even = [rank(movable[number::_NUM_RANKS]) for number in range(_NUM_RANKS)]
    return [
        Cost(
            category="partition",
            operation=f"plan the moves from one rank to {_NUM_RANKS - 1} idle ones",
            unit=f"{batch} sequences",
            samples_s=sample(lambda: plan_moves(tail, plan, Migration.EVEN), rounds=rounds),
        ),
        Cost(
            category="scheduling at a boundary",
            operation=f"one decision for {_NUM_RANKS} ranks that are even",
            unit=f"{batch} running in all",
            samples_s=sample(lambda: decide_group(even, plan, Migration.EVEN), rounds=rounds),
            per_step=1 / plan.boundary_tokens,
        ),
    ]
