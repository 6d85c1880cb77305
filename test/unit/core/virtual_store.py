"""Owns a virtual rank's part of a store that several ranks share: blocks without content."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.kv_offload.leased_store import LeasedStore


@dataclass(slots=True, kw_only=True)
class VirtualBlocks:
    """What a lease asks of `StoredKV`. No copy runs, so that no block of an ended sequence is still written to."""

    leased: int
    num_pending: int = 0


class VirtualKV:
    """`leased`: the rank's lease, if its account is of a store that several ranks share."""

    def __init__(self, account: PageLedger) -> None:
        self.leased: LeasedStore | None = None
        if account.pool_pages:
            blocks = VirtualBlocks(leased=account.total_pages)
            self.leased = LeasedStore(blocks, total=account.pool_pages, account=account)  # type: ignore[arg-type]
