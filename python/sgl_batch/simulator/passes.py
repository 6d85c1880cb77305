"""Owns a pass of ranks in lockstep: what each of them does in it, and how long it takes by a cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_batch.core.sequence import SequenceState
from sgl_batch.planner.pass_cost import PassTime
from sgl_batch.simulator.rank import Prompts, SimulatedRank
from sgl_batch.simulator.work import Costs, PassWork

# How many tokens to look at cost as much as one row's weights, roughly: only which rank is the busiest depends on it.
_ROW_WEIGHT = 512


@dataclass(slots=True)
class RankPass:
    """What a rank does in a pass. `whole`: whose prompts it completes. `decodes`: whether its running ones, too."""

    prompts: Prompts
    whole: list[SequenceState]
    decodes: bool


PLAIN = RankPass(Prompts(), [], decodes=True)


def together(parts: Sequence[Prompts]) -> Prompts:
    """Return the prompts of several parts as those of one."""
    return Prompts(
        count=sum(one.count for one in parts),
        tokens=sum(one.tokens for one in parts),
        pairs=sum(one.pairs for one in parts),
    )


def pass_time(
    ranks: Sequence[SimulatedRank],
    passes: Sequence[RankPass | None],
    decoding: Sequence[bool],
    steps: int,
    costs: Costs,
) -> tuple[PassTime, float]:
    """Return the time of the pass of the busiest rank, halfway through the steps, and the mean share of that.

    Where some ranks compute prompts and others decode, as those that decide by themselves do, the busiest of each kind
    is priced, and the others of its kind by their work.
    """
    works = []
    for rank, one, on in zip(ranks, passes, decoding, strict=True):
        prompts = PLAIN.prompts if one is None else one.prompts
        rows = len(rank.running) if on else 0
        works.append((prompts, rows, (rank.kv_tokens + rows * (steps - 1) // 2) if rows else 0))
    all_rows = sum(prompts.tokens + rows for prompts, rows, _ in works)
    load = [prompts.pairs + kv + _ROW_WEIGHT * (prompts.tokens + rows) for prompts, rows, kv in works]

    def time_of(number: int) -> PassTime:
        prompts, rows, kv = works[number]
        return costs.of_pass(
            PassWork(
                prompts=prompts.count,
                prompt_tokens=prompts.tokens,
                prompt_pairs=prompts.pairs,
                rows=rows,
                kv_tokens=kv,
                all_rows=all_rows,
                streams=ranks[number].form.streams,
            )
        )

    # The rank with the most rows and the one with the most tokens to look at are not always the same.
    fullest = max(range(len(works)), key=lambda number: works[number][0].tokens + works[number][1])
    kinds = [[number for number in range(len(works)) if bool(works[number][0].tokens) is one] for one in (True, False)]
    busiest = [max(kind, key=load.__getitem__) for kind in kinds if any(load[number] for number in kind)]
    times = {number: time_of(number) for number in {fullest, *busiest}}
    longest = max(times.values(), key=lambda time: time.seconds)
    if len(busiest) < 2:
        return longest, min(sum(load) / len(load) / max(*load, 1), 1.0)
    busy_s = sum(
        times[number].seconds * sum(load[other] for other in kind) / load[number]
        for number, kind in zip(busiest, kinds, strict=True)
    )
    return longest, min(busy_s / len(load) / longest.seconds, 1.0)
