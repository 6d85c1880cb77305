"""Decides when the last sequences of a batch are partitioned: each by a set of ranks (BatchGen 4.2, 5.3). Pure.

The engine does not do this yet: core/ has no such action. The rule is here so that its worth can be simulated.

Theory of operation. Near the end of a batch nothing waits to refill the groups. Migration has then spread the running
sequences evenly over the ranks, and a step takes as long with one sequence on each rank as with a few: each rank reads
its whole attention and the experts that are reached, and rows are exchanged between all. If the ranks of a set share
every matrix of each sequence instead, they read less. The change takes seconds and each set then has the KV of its
sequences on all its ranks, so that it pays only where the rest of the batch takes long.

At a boundary both are compared by modelled seconds up to the end of the last sequence. What a sequence will generate is
not known. What counts for it is the mean length of the outputs of this batch that have ended and are longer than it is
already; if none is, half of what its limit leaves. There is no way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_batch.core.page_ledger import pages_for
from sgl_batch.core.plan import Plan
from sgl_batch.simulator.work import Costs, PassWork

Lengths = npt.NDArray[np.int64]
# Steps are priced at so many moments up to the end of the last sequence.
_MOST_SPANS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A running sequence: tokens that it has generated, the most that it may, and its tokens of KV."""

    generated: int
    most: int
    kv_tokens: int

    @property
    def most_kv_tokens(self) -> int:
        """Return the tokens of KV with which it may end."""
        return self.kv_tokens + self.most - self.generated


@dataclass(frozen=True, slots=True, kw_only=True)
class Sets:
    """The ranks of an instance in sets that are tensor parallel: those of a set compute the same sequences together.

    Attributes:
        count: How many sets.
        ranks: Of a set.
        costs: Of the passes of one set.
        tokens: Tokens of KV that a set holds.
    """

    count: int
    ranks: int
    costs: Costs
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LongTail:
    """What is compared for the last sequences of an instance.

    Attributes:
        ranks: Of the instance.
        costs: Of passes of all of them, with sequences of their own each.
        sets: The forms into which they may change.
        change_s: Seconds of a change.
        alike: For how many ranks each simulated one stands.
    """

    ranks: int
    costs: Costs
    sets: Sequence[Sets]
    change_s: float
    alike: int = 1

    def best(self, running: Sequence[Straggler], ended: Lengths, plan: Plan, *, streams: bool = False) -> Sets | None:
        """Return the sets in which the running sequences end soonest; None where the ranks stay as they are.

        Args:
            running: The sequences of the simulated ranks, at least one; nothing waits on any rank.
            ended: Lengths of the outputs that have ended.
            plan: In force.
            streams: Whether decode steps read KV from the store now.
        """
        everyone = list(running) * self.alike
        fitting = [sets for sets in self.sets if _fits(everyone, sets, plan)]
        if not fitting:
            return None
        left = np.repeat(expected_left(running, ended), self.alike)
        kv_tokens = sum(one.kv_tokens for one in everyone)
        found: Sets | None = None
        least_s = remaining_s(left, kv_tokens, self.ranks, self.costs, shared=False, streams=streams)
        for sets in fitting:
            seconds = self.change_s + sets.costs.of_move(kv_tokens / sets.count).seconds
            seconds += remaining_s(left, kv_tokens, sets.count, sets.costs, shared=True)
            if seconds < least_s:
                found, least_s = sets, seconds
        return found


def expected_left(running: Sequence[Straggler], ended: Lengths) -> npt.NDArray[np.float64]:
    """Return the tokens that each sequence is expected to generate yet, by what an engine may know of it."""
    generated = np.array([one.generated for one in running], dtype=np.float64)
    most = np.array([one.most for one in running], dtype=np.float64)
    lengths = np.sort(ended)
    first = np.searchsorted(lengths, generated, side="right")
    sums = np.append(np.cumsum(lengths[::-1])[::-1], 0)
    longer = len(lengths) - first
    mean = sums[first] / np.maximum(longer, 1)
    return np.clip(np.where(longer > 0, mean - generated, (most - generated) / 2), 1, np.maximum(most - generated, 1))


def remaining_s(
    left: npt.NDArray[np.float64], kv_tokens: int, parts: int, costs: Costs, *, shared: bool, streams: bool = False
) -> float:
    """Return the seconds up to the end of the last sequence.

    Args:
        left: Tokens that each will generate yet.
        kv_tokens: Tokens of KV of all of them.
        parts: Ranks, or sets of ranks, over which they are spread evenly.
        costs: Of a pass of all ranks, or of a set.
        shared: Whether the parts are sets, of which each computes its rows alone.
        streams: Whether decode steps read KV from the store.
    """
    steps, context = np.sort(left), kv_tokens / len(left)
    seconds = done = 0.0
    size = -(-len(steps) // _MOST_SPANS)
    for begin in range(0, len(steps), size):
        alive = len(steps) - begin
        end = float(steps[min(begin + size, len(steps)) - 1])
        rows = -(-alive // parts)
        looked_at = round(rows * (context + (done + end) / 2))
        work = PassWork(rows=rows, kv_tokens=looked_at, all_rows=rows if shared else alive, streams=streams)
        seconds += (end - done) * costs.of_pass(work).seconds
        done = end
    return seconds


def _fits(running: Sequence[Straggler], sets: Sets, plan: Plan) -> bool:
    """Return whether each set can run its part at once, with all that any of the sequences may generate."""
    rows = -(-len(running) // sets.count)
    if rows > plan.decode.b_moe:
        return False
    largest = sorted((pages_for(one.most_kv_tokens, plan.page_size) for one in running), reverse=True)[:rows]
    return sum(largest) * plan.page_size <= sets.tokens
