"""Carries a partition out: the running sequences of all ranks go on in sets of ranks. core/tail_cost decides on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sgl_batch.core.plan import Plan
from sgl_batch.core.tail_cost import LongTail, Sets, Straggler
from sgl_batch.planner.candidate import DEVICE
from sgl_batch.planner.pass_cost import PassTime
from sgl_batch.simulator.kv_forms import RankPages, make_form
from sgl_batch.simulator.rank import SimulatedRank
from sgl_batch.simulator.work import Costs, PassWork


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """The seconds of decode steps by the costs of passes, as core/tail_cost asks for them."""

    costs: Costs

    def step_s(self, *, rows: int, kv_tokens: int, all_rows: int, streams: bool) -> float:
        work = PassWork(rows=rows, kv_tokens=kv_tokens, all_rows=all_rows, streams=streams)
        return self.costs.of_pass(work).seconds

    def move_s(self, tokens: float) -> float:
        return self.costs.of_move(tokens).seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TailForms:
    """The forms in which the last sequences can go on: what is compared, and costs of passes by the ranks of a set."""

    compared: LongTail
    costs: Mapping[int, Costs]

    @classmethod
    def of(
        cls,
        ranks: int,
        costs: Costs,
        sets: Mapping[int, tuple[Costs, int]],
        *,
        change_s: float,
        alike: int = 1,
    ) -> TailForms:
        """Return the forms of an instance of so many ranks.

        Args:
            ranks: Of the instance.
            costs: Of its passes.
            sets: By ranks of a set, costs of its passes, and the tokens of KV that it holds.
            change_s: Seconds of a change.
            alike: For how many ranks each simulated one stands.
        """
        compared = LongTail(
            ranks=ranks,
            costs=StepSeconds(costs),
            sets=[
                Sets(count=ranks // size, ranks=size, costs=StepSeconds(of_set), tokens=tokens)
                for size, (of_set, tokens) in sets.items()
            ],
            change_s=change_s,
            alike=alike,
        )
        return cls(compared=compared, costs={size: of_set for size, (of_set, _) in sets.items()})


class SetCosts:
    """Costs of an instance whose simulated ranks are sets, each of which computes its rows alone.

    `times`: how many sequences each simulated one stands for.
    """

    def __init__(self, costs: Costs, times: int) -> None:
        self.sources = costs.sources
        self._costs, self._times = costs, times

    def of_pass(self, work: PassWork) -> PassTime:
        rows = work.rows * self._times
        return self._costs.of_pass(replace(work, rows=rows, kv_tokens=work.kv_tokens * self._times, all_rows=rows))

    def of_copy(self, tokens: float) -> PassTime:
        return self._costs.of_copy(tokens * self._times)

    def of_move(self, tokens: float) -> PassTime:
        return self._costs.of_move(tokens * self._times)

    def of_boundary(self) -> PassTime:
        return self._costs.of_boundary()


def stragglers(ranks: Sequence[SimulatedRank]) -> list[Straggler]:
    """Return the running sequences of ranks as the decision sees them."""
    return [
        Straggler(generated=one.generated_tokens, most=one.max_new_tokens, kv_tokens=one.kv_tokens)
        for rank in ranks
        for one in rank.group.up_to_date()
    ]


def into_sets(ranks: Sequence[SimulatedRank], sets: Sets, plan: Plan, *, alike: int) -> list[SimulatedRank]:
    """Move the running sequences of ranks to sets, and return these as ranks.

    The sequences with the most KV go first, to the sets by turns. `alike`: for how many ranks each one stands; one set
    then stands for all.
    """
    first, times = ranks[0], sets.ranks if alike > 1 else 1
    pages = RankPages(device=sets.tokens // plan.page_size // times)
    made = [
        SimulatedRank(
            first.requests, (), plan, make_form(DEVICE, pages, plan.page_size), request_slots=first.request_slots
        )
        for _ in range(1 if alike > 1 else sets.count)
    ]
    leaving = [(rank, one) for rank in ranks for one in rank.group.up_to_date()]
    leaving.sort(key=lambda item: (-item[1].kv_tokens, item[1].arrival))
    for turn, (rank, one) in enumerate(leaving):
        rank.depart(one)
        made[turn % len(made)].adopt(one)
    return made


def fullest_tokens(ranks: Sequence[SimulatedRank]) -> int:
    """Return the tokens of KV of the rank that has the most of those that run or wait."""
    return max(rank.kv_tokens + sum(one.kv_tokens for one in rank.ready.values()) for rank in ranks)
