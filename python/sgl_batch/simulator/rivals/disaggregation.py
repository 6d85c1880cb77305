"""Owns prefill-decode disaggregation: some units compute prompts alone, and hand their KV to units that decode.

Units are instances of equal size. A prompt's KV leaves its rank when the prompt is done, one prompt behind the other,
and waits for room in a decode unit without holding up the prefill unit, as if that had memory for it (to the policy's
favour). A decode unit takes a sequence while pages for it and for a part of its output are free.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sgl_batch.core.plan import Plan
from sgl_batch.core.sequence import Status
from sgl_batch.simulator.instance import Instance
from sgl_batch.simulator.rank import SimulatedRank
from sgl_batch.simulator.requests import Requests
from sgl_batch.simulator.rivals.lazy_pages import LazyPages, pages_ahead
from sgl_batch.simulator.rivals.static_binding import PrefillFirst
from sgl_batch.simulator.rivals.token_ratio import TokenRatio
from sgl_batch.simulator.timeline import Account
from sgl_batch.simulator.work import Costs

# Tokens of further output that a decode unit keeps free for each of its sequences (SGLang's default).
_KEPT_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What all units have: how many ranks of so many pages, and how many sequences each may hold."""

    ranks: int
    pages: int
    request_slots: int


@dataclass(frozen=True, slots=True)
class Handed:
    """A sequence whose prompt is done: when its KV has arrived, and its number."""

    at: float
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRun:
    """A unit's account, its ranks, and for how many equal units it stands."""

    account: Account
    ranks: Sequence[SimulatedRank]
    stands_for: int


def prefill_unit(
    requests: Requests, numbers: Sequence[int], unit: Unit, plan: Plan, costs: Costs
) -> tuple[Instance, list[Handed]]:
    """Run a unit that computes these prompts alone.

    Returns the instance, and what it hands over in the order of time; sequences of one token end there. It refuses
    those that no decode unit can hold.
    """
    handed: list[Handed] = []
    ones = np.ones(len(requests), dtype=np.int64)
    alone = Requests(prompts=requests.prompts, outputs=ones, most=requests.most)
    free_at = [0.0] * unit.ranks
    made: list[Instance] = []

    def hand_over(rank: int, number: int) -> None:
        if requests.outputs[number] > 1:
            begins = max(made[0].now, free_at[rank])
            free_at[rank] = begins + costs.of_move(int(requests.prompts[number])).seconds
            handed.append(Handed(free_at[rank], number))

    ranks = []
    for rank in range(unit.ranks):
        form = LazyPages(
            unit.pages,
            plan.page_size,
            TokenRatio(),
            waits_last=True,
            on_release=lambda one, rank=rank: hand_over(rank, int(one.sequence_id)),  # type: ignore[misc]
        )
        own = numbers[rank :: unit.ranks]
        ranks.append(SimulatedRank(alone, own, plan, form, request_slots=unit.request_slots))
    made.append(Instance(ranks, plan, PrefillFirst(), costs))
    made[0].run()
    return made[0], sorted(handed, key=lambda one: one.at)


class Receiving:
    """Gives the ranks of a decode unit, by turns, the sequences whose KV has arrived, as soon as there is room."""

    def __init__(self, requests: Requests, handed: Sequence[Handed], ranks: Sequence[SimulatedRank], plan: Plan):
        self._requests, self._handed, self._ranks, self._plan = requests, deque(handed), ranks, plan
        self._waiting: list[deque[int]] = [deque() for _ in ranks]
        self._turn = 0

    def __call__(self, now: float) -> float:
        """See `instance.Arrivals`."""
        while self._handed and self._handed[0].at <= now:
            self._waiting[self._turn % len(self._ranks)].append(self._handed.popleft().number)
            self._turn += 1
        for rank, waiting in zip(self._ranks, self._waiting, strict=True):
            while waiting and self._adopt(rank, waiting[0]):
                waiting.popleft()
        return self._handed[0].at if self._handed else math.inf

    def _adopt(self, rank: SimulatedRank, number: int) -> bool:
        ledger, sequence = rank.form.device, self._requests.sequence(number)
        sequence.generated_tokens, sequence.status = 1, Status.MIGRATING
        held = len(rank.running) + len(rank.ready)
        kept = (held + 1) * _KEPT_TOKENS // ledger.page_size
        fits = pages_ahead(sequence, ledger, self._plan) + kept <= ledger.free_pages
        is_empty = not ledger.reserved_pages
        if rank.queue or held >= self._plan.decode.b_moe or not (fits or is_empty):
            return False
        rank.adopt(sequence)
        return True


def decode_unit(requests: Requests, handed: Sequence[Handed], unit: Unit, plan: Plan, costs: Costs) -> Instance:
    """Run a unit that decodes these sequences. Those that it retracts compute their prompts again there."""
    ranks = [
        SimulatedRank(
            requests,
            (),
            plan,
            LazyPages(unit.pages, plan.page_size, TokenRatio(), waits_last=True),
            request_slots=unit.request_slots,
        )
        for _ in range(unit.ranks)
    ]
    receiving = Receiving(requests, handed, ranks, plan)
    instance = Instance(ranks, plan, PrefillFirst(), costs, arrivals=receiving)
    instance.run()
    return instance


def disaggregated(
    requests: Requests, unit: Unit, plan: Plan, costs: Costs, *, prefill: int, decode: int, alike: bool
) -> tuple[list[UnitRun], list[UnitRun]]:
    """Run all sequences on so many units of each phase; returns the runs of both.

    `alike`: whether all sequences have equal lengths, so that one unit of a phase stands for all of it.
    """
    first, handed = [], list[Handed]()
    for index in range(1 if alike else prefill):
        instance, own = prefill_unit(requests, range(index, len(requests), prefill), unit, plan, costs)
        copies = prefill if alike else 1
        first.append(UnitRun(account=instance.account, ranks=instance.ranks, stands_for=copies))
        handed += [one for one in own for _ in range(copies)]
    handed.sort(key=lambda one: one.at)
    if alike:
        # Which of them a copy stands for makes no difference; each number goes to one unit.
        handed = [Handed(one.at, number) for number, one in enumerate(handed[: len(requests)])]
    second = []
    for index in range(1 if alike else decode):
        instance = decode_unit(requests, handed[index::decode], unit, plan, costs)
        second.append(UnitRun(account=instance.account, ranks=instance.ranks, stands_for=decode if alike else 1))
    return first, second
