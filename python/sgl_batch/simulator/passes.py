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
    """Return the time of the pass of the busiest rank, halfway through the steps, and the mean share of that."""
    works = []
    for rank, one, on in zip(ranks, passes, decoding, strict=True):
        prompts = PLAIN.prompts if one is None else one.prompts
        rows = len(rank.running) if on else 0
        works.append((prompts, rows, (rank.kv_tokens + rows * (steps - 1) // 2) if rows else 0))
    all_rows = sum(prompts.tokens + rows for prompts, rows, _ in works)
    load = [prompts.pairs + kv + _ROW_WEIGHT * (prompts.tokens + rows) for prompts, rows, kv in works]
    # The rank with the most rows and the one with the most tokens to look at are not always the same.
    busiest = {
        max(range(len(works)), key=load.__getitem__),
        max(range(len(works)), key=lambda number: works[number][0].tokens + works[number][1]),
    }
    times = [
        costs.of_pass(
            PassWork(
                prompts=works[number][0].count,
                prompt_tokens=works[number][0].tokens,
                prompt_pairs=works[number][0].pairs,
                rows=works[number][1],
                kv_tokens=works[number][2],
                all_rows=all_rows,
                streams=ranks[number].form.streams,
            )
        )
        for number in busiest
    ]
    mean = sum(load) / len(load)
    return max(times, key=lambda time: time.seconds), mean / max(*load, 1)
