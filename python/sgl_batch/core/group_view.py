"""Owns what callbacks see of a group of ranks at a boundary. A callback reads it and changes nothing in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from sgl_batch.core.actions import Actions, Migrate
from sgl_batch.core.ended_lengths import EndedLengths
from sgl_batch.core.partition import anything_waits, partitioned_sets
from sgl_batch.core.plan import Plan
from sgl_batch.core.rank_state import Movable, RankState
from sgl_batch.core.tail_cost import LongTail


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """All ranks at a boundary, as a decision for them is recorded. Sequences have their tokens and limits.

    ranks: by rank, its sequences, its free pages and request slots. `RankState.state` has those that are queued, and
        all READY and SUSPENDED ones; `RankState.ready` and `RankState.running` have those that may change their rank,
        with their tokens of KV and the pages that they take, and `RankState.queued` the first queued ones that may.
        The running ones that may not are only counted (`RankState.state.running`).
    plan: the plan in force; `plan.decode.b_moe` is the most that run on a rank at once.
    ended: lengths of the outputs that have ended so far, on all ranks.
    pooled: the moves by which sequences that wait in a store of all ranks run where there is room, those first that
        wait longest (core/waiting_pool). None without such a store.
    prefills: the ranks that would prefill now: those below their watermark, also after the moves of `pooled`, at the
        head of whose queue a prompt fits; with the pages that are kept for this prompt.
    evening: the moves that even out the ranks' counts of sequences, after those. None where ranks would prefill, or
        where sequences wait for a place on any rank of such a store.
    migrates: whether sequences may change their rank (--migration).
    costs: modelled costs of partitions; None where there is no profile of them.
    """

    ranks: tuple[RankState, ...]
    plan: Plan
    ended: EndedLengths = field(default_factory=EndedLengths)
    pooled: tuple[Migrate, ...] = ()
    prefills: Mapping[int, int] = field(default_factory=dict)
    evening: tuple[Migrate, ...] = ()
    migrates: bool = True
    costs: LongTail | None = None

    @property
    def waits(self) -> bool:
        """Whether any sequence of any rank waits: is queued, READY, SUSPENDED, or on its way to the device."""
        return anything_waits(self.ranks)

    @property
    def shares_store(self) -> bool:
        """Whether the KV of what waits lies in a store that all ranks read."""
        return all(rank.store is not None for rank in self.ranks)

    @property
    def num_running(self) -> int:
        """The number of sequences that run, on all ranks. A partitioned one counts once."""
        return sum(rank.state.running - rank.replicas for rank in self.ranks)

    @property
    def partitions(self) -> list[frozenset[int]]:
        """The sets of ranks over which sequences are partitioned now, those with the lowest ranks first."""
        return partitioned_sets(self.ranks)

    def running(self) -> Iterator[tuple[int, Movable]]:
        """Yield the running sequences that may change their rank, each with its rank."""
        return ((number, item) for number, rank in enumerate(self.ranks) for item in rank.running)


Callback = Callable[[GroupView], Actions]
"""Decides at a boundary of several ranks, on the control rank, from the view alone: the same view, the same actions."""
