"""Owns the measured seconds of passes that ranks run alone or share, and what follows from them for partitions.

They are measured once, when an engine starts, and then are plain numbers, which a record of a decision holds. A step is
priced by the number of sequences that all ranks decode together: between two measured numbers on the straight line that
joins them, and beyond the largest one nothing is known, so that nothing is partitioned. What a step takes longer with
more KV is measured with one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from sgl_batch.core.tail_cost import LongTail, Sets

if TYPE_CHECKING:  # it is for a view of ranks, which has costs
    from sgl_batch.core.group_view import GroupView

# A shared prompt must be so many times as fast.
_WINS_BY = 1.05
# Seconds in which all ranks agree to begin a partition, beside the copies of KV.
_CHANGE_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPasses:
    """Seconds of passes of one form: of ranks alone, or shared by all.

    Attributes:
        step_s: Of a decode step, for each of `PartitionCosts.sequences`.
        kv_token_s: That a step takes longer for each token of KV that the busiest rank looks at.
        prompt_s: Of a prompt, for each of `PartitionCosts.prompt_tokens`.
    """

    step_s: tuple[float, ...]
    kv_token_s: float
    prompt_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionCosts:
    """Measured seconds of both forms.

    Attributes:
        ranks: Of the engine; a set is all of them.
        sequences: Numbers of sequences of all ranks together, ascending.
        prompt_tokens: Lengths of prompts, ascending.
        alone: With sequences of its own on each rank, and a prompt on one of them.
        shared: Of all ranks, which compute the same rows.
        move_token_s: Seconds of copying the KV of one token to another rank.
    """

    ranks: int
    sequences: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    alone: MeasuredPasses
    shared: MeasuredPasses
    move_token_s: float

    @property
    def least_prompt_tokens(self) -> int:
        """The measured length from which on all ranks together are faster with a prompt; 0 if they never are."""
        least = 0
        pairs = zip(self.prompt_tokens, self.alone.prompt_s, self.shared.prompt_s, strict=True)
        for tokens, alone_s, shared_s in reversed(list(pairs)):
            if alone_s < _WINS_BY * shared_s:
                break
            least = tokens
        return least

    def long_tail(self, view: GroupView) -> LongTail:
        """Return what is compared for the last sequences; no sets for more of them than were measured."""
        kv_tokens = min(rank.total_pages for rank in view.ranks) * view.plan.page_size
        shared = Sets(count=1, ranks=self.ranks, costs=_Steps(self, self.shared), tokens=kv_tokens)
        known = view.num_running <= self.sequences[-1]
        return LongTail(
            ranks=self.ranks, costs=_Steps(self, self.alone), sets=[shared] if known else [], change_s=_CHANGE_S
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers as plain data."""
        return asdict(self)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> PartitionCosts:
        """Return the costs that `as_dict` has written. Raises LookupError, TypeError or ValueError for other data."""
        costs = cls(
            ranks=int(plain["ranks"]),
            sequences=tuple(int(one) for one in plain["sequences"]),
            prompt_tokens=tuple(int(one) for one in plain["prompt_tokens"]),
            alone=_passes_of(plain["alone"]),
            shared=_passes_of(plain["shared"]),
            move_token_s=float(plain["move_token_s"]),
        )
        for passes in (costs.alone, costs.shared):
            if len(passes.step_s) != len(costs.sequences) or len(passes.prompt_s) != len(costs.prompt_tokens):
                raise ValueError("each measured size has one time in each form")
        return costs


@dataclass(frozen=True, slots=True)
class _Steps:
    """The seconds of decode steps of one form, as core/tail_cost asks for them."""

    costs: PartitionCosts
    passes: MeasuredPasses

    def step_s(self, *, rows: int, kv_tokens: int, all_rows: int, streams: bool) -> float:
        assert not streams, "ranks that stream KV take no replicas"
        return _between(self.costs.sequences, self.passes.step_s, all_rows) + kv_tokens * self.passes.kv_token_s

    def move_s(self, tokens: float) -> float:
        return tokens * self.costs.move_token_s


def _passes_of(plain: Mapping[str, Any]) -> MeasuredPasses:
    return MeasuredPasses(
        step_s=tuple(float(one) for one in plain["step_s"]),
        kv_token_s=float(plain["kv_token_s"]),
        prompt_s=tuple(float(one) for one in plain["prompt_s"]),
    )


def _between(sizes: Sequence[int], seconds: Sequence[float], size: int) -> float:
    """Return the seconds of a size by the measured ones next to it; beyond them, those of the nearest."""
    points = list(zip(sizes, seconds, strict=True))
    for (low, low_s), (high, high_s) in pairwise(points):
        if low <= size <= high:
            return low_s + (high_s - low_s) * (size - low) / (high - low)
    return points[0][1] if size < sizes[0] else points[-1][1]
