"""Stand-in costs: seconds that are linear in the work, and ranks that are checked before each pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from sgl_batch.core.page_ledger import pages_for
from sgl_batch.core.plan import PhasePlan, Plan
from sgl_batch.planner.pass_cost import PassTime
from sgl_batch.simulator.instance import Instance
from sgl_batch.simulator.rank import SimulatedRank
from sgl_batch.simulator.requests import Requests
from sgl_batch.simulator.work import PassWork

PAGE = 8


def seconds(**parts: float) -> PassTime:
    """Return a time of these parts, which memory bounds."""
    found = defaultdict(float, parts)
    return PassTime(parts=found, bounds=defaultdict(float, memory=sum(found.values())), bottleneck="experts")


class LinearCosts:
    """Seconds that are linear in the work. `watched`: ranks whose pages are checked before each pass."""

    def __init__(self, watched: Sequence[SimulatedRank] = ()) -> None:
        self.sources = {"all": "made up"}
        self.watched = watched
        self.passes: list[PassWork] = []

    def of_pass(self, work: PassWork) -> PassTime:
        for rank in self.watched:
            check_pages(rank)
        self.passes.append(work)
        return seconds(
            attention=1e-6 * (work.kv_tokens + work.prompt_pairs), experts=0.01 + 1e-4 * work.all_rows, step=1e-3
        )

    def of_copy(self, tokens: float) -> PassTime:
        return seconds(copies=1e-6 * tokens)

    def of_move(self, tokens: float) -> PassTime:
        return seconds(copies=1e-5 * tokens)

    def of_boundary(self) -> PassTime:
        return seconds(boundary=0.0)


def check_pages(rank: SimulatedRank) -> None:
    """Assert that all KV lies in pages that are held, and that no page is held twice or by a sequence that is gone."""
    ledger = rank.form.device
    held = ledger.reservations()
    here = {**rank.running, **rank.ready}
    for one in rank.group.up_to_date():
        assert held[one.sequence_id] >= pages_for(one.kv_tokens, ledger.page_size)
    begun = {rank.begun.sequence_id} if rank.begun else set()
    assert set(held) == set(here) | begun | _prefilling(rank, held)
    assert sum(held.values()) == ledger.reserved_pages <= ledger.total_pages


def _prefilling(rank: SimulatedRank, held: dict[str, int]) -> set[str]:
    """Return those whose prompts the pass computes: they hold pages, and neither run nor wait."""
    queued = {one.sequence_id for one in rank.queue}
    return {name for name in held if name not in queued and name not in rank.running and name not in rank.ready}


def requests(prompts: Sequence[int], outputs: Sequence[int], most: Sequence[int] | None = None) -> Requests:
    """Return requests of these lengths."""
    arrays = [np.array(one, dtype=np.int64) for one in (prompts, outputs, outputs if most is None else most)]
    return Requests(prompts=arrays[0], outputs=arrays[1], most=arrays[2])


def plan(chunk: int = 64, rows: int = 16) -> Plan:
    """Return limits of prompt tokens and decoded sequences, with an interval of a page."""
    return Plan(
        prefill=PhasePlan(b_attn=chunk, b_moe=chunk),
        decode=PhasePlan(b_attn=rows, b_moe=rows),
        page_size=PAGE,
        boundary_tokens=PAGE,
        refill_watermark=0.5,
        ready_target=rows,
    )


def total(ranks: Sequence[SimulatedRank], count: str) -> int:
    """Return a count of all ranks together."""
    return sum(int(getattr(rank.tally, count)) for rank in ranks)


def run_checked(ranks: Sequence[SimulatedRank], scheduler: object, the_plan: Plan) -> tuple[Instance, LinearCosts]:
    """Run ranks to the end, and check their pages before each pass and at the end."""
    costs = LinearCosts(ranks)
    instance = Instance(ranks, the_plan, scheduler, costs)  # type: ignore[arg-type]
    instance.run()
    for rank in ranks:
        assert rank.is_empty
        assert rank.form.device.reserved_pages == 0
    return instance, costs
