"""Owns what decisions for several ranks know of each: its sequences, its account of pages, and what may leave it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sgl_batch.core.admission_policy import RESERVE, AsNoted
from sgl_batch.core.early_copies import HeldCopy
from sgl_batch.core.exclusive import TierCapacity
from sgl_batch.core.move_costs import UNKNOWN, MoveRates
from sgl_batch.core.page_boundary import State
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.sequence import SequenceState
from sgl_batch.core.store_lease import Lease, StoreUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Movable:
    """A sequence that may change its rank, with `tokens` of KV; a queued one has none.

    It reserves `pages` where it arrives, and can need `gap` more. `leased`: how many of them it brings along, of its
    rank's lease of a store that all ranks share. A sequence that belongs to several ranks stays with them.
    `replicable`: whether it would end at the same step on each of several ranks.
    """

    sequence: SequenceState
    tokens: int
    pages: int
    gap: int = 0
    leased: int = 0
    replicable: bool = True

    @property
    def new_pages(self) -> int:
        """The pages that it takes from the account of the rank where it arrives; negative if it brings more."""
        return self.pages - self.leased


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """A rank at a boundary: its state, its account of pages for admission, and the sequences that may leave it.

    `ended`: lengths of the outputs that have ended there since the last boundary.
    `overflow_pages`, `largest` and `capacity` are for an exclusive store. `grows`, `largest_gap` and `has_waiting` are
    for reservations that grow, as in its `PageLedger`. `ready` and `running`: the waiting and the running sequences
    that may leave. `partition`: the set of ranks that it is partitioned with; empty if it is not. `replicas`: how many
    of its running sequences other ranks own. `takes_replicas`: whether it can be partitioned. `store`: what it has of a
    store that it shares with other ranks; None without one. `lacking`: pages that admitted sequences wait for.
    `device_room`: with such a store, pages of the device for sequences that wait. `replica_room`: pages of the device
    for replicas, where admission has another account; None where it has the device's. `sends_pages`: whether sequences
    leave with their pages, and not by reference to a store. `held`: what it holds of sequences of other ranks.
    `queued`: the first queued sequences, as far as they may leave. `rates`: as measured on it.
    """

    state: State
    total_pages: int
    free_pages: int
    overflow_pages: int = 0
    largest: int = 0
    grows: bool = False
    largest_gap: int = 0
    has_waiting: bool = False
    capacity: TierCapacity | None = None
    ready: Sequence[Movable] = ()
    running: Sequence[Movable] = ()
    ended: tuple[int, ...] = ()
    partition: frozenset[int] = frozenset()
    replicas: int = 0
    takes_replicas: bool = True
    store: StoreUse | None = None
    lacking: int = 0
    device_room: int = 0
    replica_room: int | None = None
    sends_pages: bool = False
    held: Sequence[HeldCopy] = ()
    queued: Sequence[Movable] = ()
    rates: MoveRates = UNKNOWN

    @classmethod
    def of(
        cls,
        state: State,
        account: PageLedger,
        capacity: TierCapacity | None,
        movable: tuple[Sequence[Movable], Sequence[Movable]],
        *,
        ended: Sequence[int] = (),
        partition: frozenset[int] = frozenset(),
        replicas: int = 0,
        takes_replicas: bool = True,
        store: StoreUse | None = None,
        device_room: int = 0,
        replica_room: int | None = None,
        sends_pages: bool = False,
        held: Sequence[HeldCopy] = (),
        queued: Sequence[Movable] = (),
        rates: MoveRates = UNKNOWN,
    ) -> RankState:
        """Return the state of a rank with this account of admission. `movable`: waiting and running sequences."""
        ready, running = movable
        return cls(
            state=state,
            total_pages=account.total_pages,
            free_pages=account.free_pages,
            overflow_pages=account.overflow_pages,
            largest=account.largest,
            grows=account.policy.grows,
            largest_gap=account.largest_gap,
            has_waiting=account.has_waiting,
            capacity=capacity,
            ready=ready,
            running=running,
            ended=tuple(ended),
            partition=partition,
            replicas=replicas,
            takes_replicas=takes_replicas,
            store=store,
            device_room=device_room,
            replica_room=replica_room,
            sends_pages=sends_pages,
            held=held,
            lacking=sum(account.whole_need(name) - account.held(name) for name in account.stalled),
            queued=queued,
            rates=rates,
        )

    @property
    def room_for_replicas(self) -> int:
        """Pages of the device for replicas, when its own running sequences have reserved all that they can need."""
        if self.replica_room is not None:
            return self.replica_room
        return self.free_pages - sum(item.gap for item in self.running)

    @property
    def num_resident(self) -> int:
        """The number of its sequences that run or have been prefilled."""
        return self.state.running + len(self.state.ready) + self.state.returning

    def with_lease(self, lease: Lease) -> RankState:
        """Return the state with this lease of the store that it shares."""
        assert self.store is not None, "only a rank that shares a store has a lease"
        more, store = lease.blocks - self.store.leased, replace(self.store, leased=lease.blocks)
        if self.store.is_account:
            total, free = self.total_pages + more, self.free_pages + more
            return replace(self, store=store, total_pages=total, free_pages=free)
        if self.capacity is None:
            return replace(self, store=store)
        before, after = (max(0, blocks - self.largest) for blocks in (self.store.leased, lease.blocks))
        return replace(
            self,
            store=store,
            overflow_pages=lease.blocks,
            free_pages=self.free_pages + after - before,
            capacity=replace(self.capacity, store=self.capacity.store + more),
        )

    @property
    def _pool_pages(self) -> int:
        """The pages of the store of which the account has a lease; 0 if it counts none of them."""
        if self.store is None or not (self.store.is_account or self.capacity is not None):
            return 0
        return self.store.total

    def ledger(self, page_size: int) -> PageLedger:
        """Return the account as a ledger, in which the reservations have no owners.

        Where reservations grow, a queued sequence reserves what its own rank has noted of it.
        """
        policy = AsNoted() if self.grows else RESERVE
        ledger = PageLedger(
            self.total_pages,
            page_size,
            overflow_pages=self.overflow_pages,
            policy=policy,
            pool_pages=self._pool_pages,
            two_tiers=self.capacity is not None,
        )
        if self.largest:
            ledger.reserve("largest", self.largest)
        if self.largest_gap:
            ledger.reserve("largest gap", 0, whole=self.largest_gap)
        if self.has_waiting:
            ledger.away.add("waits")
        ledger.add_prompt_pages(ledger.free_pages - self.free_pages)
        return ledger


def movable_by_name(rank: RankState) -> dict[str, Movable]:
    """Return the sequences that may leave a rank, by id."""
    return {item.sequence.sequence_id: item for item in (*rank.queued, *rank.ready, *rank.running)}
