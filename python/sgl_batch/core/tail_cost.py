"""Decides in which sets of ranks the last sequences of a batch end soonest, by modelled seconds (BatchGen 4.2, 5.3).

Theory of operation. Near the end of a batch nothing waits to refill the groups. Migration has then spread the running
sequences evenly over the ranks, and a step takes as long with one sequence on each rank as with a few: each rank reads
its whole attention and the experts that are reached, and rows are exchanged between all. If the ranks of a set share
every matrix of each sequence instead, they read less. The change takes time and each set then has the KV of its
sequences on all its ranks, so that it pays only where the rest of the batch takes long.

At a boundary both are compared by modelled seconds up to the end of the last sequence. What a sequence will generate is
not known. What counts for it is the mean length of the outputs of this batch that have ended and are longer than it is
already; if none is, half of what its limit leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sgl_batch.core.ended_lengths import EndedLengths
from sgl_batch.core.page_ledger import pages_for
from sgl_batch.core.plan import Plan

# Steps are priced at so many moments up to the end of the last sequence.
_MOST_SPANS = 16


class StepCosts(Protocol):
    """Modelled seconds of decode steps."""

    def step_s(self, *, rows: int, kv_tokens: int, all_rows: int, streams: bool) -> float:
        """Return the seconds of a decode step of ranks in lockstep, by the work of the busiest of them.

        Args:
            rows: Sequences that it decodes.
            kv_tokens: Tokens of KV that these look at, together.
            all_rows: Sequences of all ranks whose rows share the experts.
            streams: Whether KV is read from the store.
        """

    def move_s(self, tokens: float) -> float:
        """Return the seconds of moving the KV of so many tokens from one rank to another."""


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
        costs: Of the steps of one set.
        tokens: Tokens of KV that a set holds.
    """

    count: int
    ranks: int
    costs: StepCosts
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LongTail:
    """What is compared for the last sequences of an instance.

    Attributes:
        ranks: Of the instance.
        costs: Of steps of all of them, with sequences of their own each.
        sets: The forms into which they may change.
        change_s: Seconds of a change.
        alike: For how many ranks each one stands whose sequences are given.
    """

    ranks: int
    costs: StepCosts
    sets: Sequence[Sets]
    change_s: float
    alike: int = 1

    def best(
        self, running: Sequence[Straggler], ended: EndedLengths, plan: Plan, *, streams: bool = False
    ) -> Sets | None:
        """Return the sets in which the running sequences end soonest; None where the ranks stay as they are.

        Args:
            running: The running sequences, at least one; nothing waits on any rank.
            ended: Lengths of the outputs that have ended.
            plan: In force.
            streams: Whether decode steps read KV from the store now.
        """
        fitting = [sets for sets in self.sets if self._fits(running, sets, plan)]
        if not fitting:
            return None
        left, times = expected_left(running, ended), self.alike
        kv_tokens = times * sum(one.kv_tokens for one in running)
        found: Sets | None = None
        least_s = remaining_s(left, kv_tokens, self.ranks, self.costs, shared=False, times=times, streams=streams)
        for sets in fitting:
            seconds = self.change_s + sets.costs.move_s(kv_tokens / sets.count)
            seconds += remaining_s(left, kv_tokens, sets.count, sets.costs, shared=True, times=times)
            if seconds < least_s:
                found, least_s = sets, seconds
        return found

    def _fits(self, running: Sequence[Straggler], sets: Sets, plan: Plan) -> bool:
        """Return whether each set can run its part at once, with all that any of the sequences may generate."""
        rows = -(-len(running) * self.alike // sets.count)
        if rows > plan.decode.b_moe:
            return False
        pages = sorted((pages_for(one.most_kv_tokens, plan.page_size) for one in running), reverse=True)
        whole, over = divmod(rows, self.alike)
        most = self.alike * sum(pages[:whole]) + sum(over * one for one in pages[whole : whole + 1])
        return most * plan.page_size <= sets.tokens


def expected_left(running: Sequence[Straggler], ended: EndedLengths) -> list[float]:
    """Return the tokens that each sequence is expected to generate yet, by what an engine may know of it."""
    means = {generated: ended.mean_above(generated) for generated in {one.generated for one in running}}
    return [_expected_left(one, means[one.generated]) for one in running]


def _expected_left(one: Straggler, mean: float | None) -> float:
    limit = one.most - one.generated
    return min(max(limit / 2 if mean is None else mean - one.generated, 1.0), max(limit, 1.0))


def remaining_s(
    left: Sequence[float],
    kv_tokens: int,
    parts: int,
    costs: StepCosts,
    *,
    shared: bool,
    times: int = 1,
    streams: bool = False,
) -> float:
    """Return the seconds up to the end of the last sequence.

    Args:
        left: Tokens that each will generate yet.
        kv_tokens: Tokens of KV of all of them.
        parts: Ranks, or sets of ranks, over which they are spread evenly.
        costs: Of a step of all ranks, or of a set.
        shared: Whether the parts are sets, of which each computes its rows alone.
        times: For how many sequences each of `left` stands.
        streams: Whether decode steps read KV from the store.
    """
    steps, total = sorted(left), times * len(left)
    context = kv_tokens / total
    seconds = done = 0.0
    size = -(-total // _MOST_SPANS)
    for begin in range(0, total, size):
        alive = total - begin
        end = steps[(min(begin + size, total) - 1) // times]
        rows = -(-alive // parts)
        looked_at = round(rows * (context + (done + end) / 2))
        all_rows = rows if shared else alive
        seconds += (end - done) * costs.step_s(rows=rows, kv_tokens=looked_at, all_rows=all_rows, streams=streams)
        done = end
    return seconds
