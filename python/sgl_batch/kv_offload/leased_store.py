"""Owns what a rank may hold of the store that it shares with other ranks. core/store_lease decides how much."""

from __future__ import annotations

from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.store_lease import Lease, StoreUse
from sgl_batch.kv_offload.stored_kv import StoredKV


class LeasedStore:
    """A rank's lease: as a limit of the blocks that it takes, and in its account of admission."""

    def __init__(self, stored: StoredKV, *, total: int, account: PageLedger | None) -> None:
        """Take over a lease of as many blocks as `stored` may hold now.

        Args:
            stored: the rank's sequences in the store.
            total: blocks of the store, for all ranks.
            account: the account of admission, if it counts blocks of the store. Its lease is the same.
        """
        self._stored, self._total, self._account = stored, total, account

    @property
    def _is_account(self) -> bool:
        return self._account is not None and not self._account.two_tiers

    def use(self) -> StoreUse:
        """Return what the rank has of the store now.

        Blocks of ended sequences to which copies still run are kept besides those that the account has reserved. Both
        together may be more than the lease: before more blocks are taken, `StoredKV` then waits for these copies.
        """
        reserved = 0 if self._account is None else self._account.least_lease
        kept = reserved + self._stored.num_pending if self._is_account else max(reserved, self._stored.held)
        kept = min(kept, self._stored.leased)
        return StoreUse(total=self._total, leased=self._stored.leased, kept=kept, is_account=self._is_account)

    def set(self, lease: Lease) -> None:
        """Hold no more than this from now on. It is at least what `use` says is kept."""
        self._stored.leased = lease.blocks
        if self._account is not None:
            self._account.lease(lease.blocks, admits=lease.admits)

    def blocks_with(self, name: str) -> int:
        """Return the part of the lease that a waiting sequence takes along when it moves to another rank."""
        if self._is_account and self._account is not None:
            return self._account.held(name)
        return len(self._stored.store_blocks_of(name))

    def change(self, blocks: int) -> None:
        """Add the part of a sequence that arrives to the lease; a negative one of a sequence that has left."""
        admits = self._account is None or self._account.admits
        self.set(Lease(blocks=self._stored.leased + blocks, admits=admits))
