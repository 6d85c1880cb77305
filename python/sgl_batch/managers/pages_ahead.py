"""Owns the pages of a rank's early copies: those that it reads for another rank, and those that it keeps for one.

core/early_copies decides which copies there are, and migration/early_copies carries them out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from sgl_batch.core.early_copies import EarlyCopy
from sgl_batch.managers.sequence_table import SequenceTable
from sgl_batch.metrics.counters import Counters
from sgl_batch.sglang_adapter.types.requests import RequestKV
from sgl_batch.sglang_adapter.types.scheduler import PagePool, SGLangScheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """The first `pages` of a sequence were copied while it held its KV as `kv`, an object that it loses with its KV."""

    kv: RequestKV | None
    pages: int


class PagesAhead:
    """The pages of early copies on this rank, from and to the KV pool of its device."""

    def __init__(self, scheduler: SGLangScheduler, table: SequenceTable, counters: Counters) -> None:
        self._scheduler, self._table, self._counters = scheduler, table, counters
        self._pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        self._page_size: int = scheduler.page_size
        self._read: dict[str, _Read] = {}
        self._prepared: frozenset[str] = frozenset()
        self._kept: dict[str, torch.Tensor] = {}

    # On the source.

    def read(self, copy: EarlyCopy) -> list[torch.Tensor]:
        request = self._table.request_named(copy.sequence_id)
        self._read[copy.sequence_id] = _Read(kv=request.kv, pages=copy.full_pages)
        self._counters.add("pages_copied_ahead", copy.full_pages)
        table = self._scheduler.req_to_token_pool.req_to_token
        own = table[request.req_pool_idx, : copy.full_pages * self._page_size]
        return list(page_views(self._pool, own, self._page_size))

    def prepare(self, sequence_ids: Collection[str]) -> None:
        """Note which sequences move now to a rank that holds a copy."""
        self._prepared = frozenset(sequence_ids)

    def num_there(self, sequence_id: str) -> int:
        """Return how many pages the target has of a sequence that moves; 0 if there is no copy, or it is stale."""
        read = self._read.get(sequence_id) if sequence_id in self._prepared else None
        kv = self._table.request_named(sequence_id).kv
        return 0 if read is None or kv is None or read.kv is not kv else read.pages

    def forget_read(self) -> None:
        """Forget all copies: the sequences have moved, or the target has dropped them."""
        self._read.clear()

    # On the target.

    def keep(self, copy: EarlyCopy) -> list[torch.Tensor] | None:
        if not self._table.reserve_ahead(copy.sequence_id, pages=copy.pages, gap=copy.gap):
            return None
        kv_indices = self._scheduler.token_to_kv_pool_allocator.alloc(copy.full_pages * self._page_size)
        assert kv_indices is not None, "the page ledger has reserved pages that the allocator has free"
        self._kept[copy.sequence_id] = kv_indices
        return list(page_views(self._pool, kv_indices, self._page_size))

    def drop(self, sequence_id: str) -> None:
        self._scheduler.token_to_kv_pool_allocator.free(self.take(sequence_id))

    def take(self, sequence_id: str) -> torch.Tensor:
        """Give the KV indices that are kept for a sequence, int64, to the caller; none if nothing is kept.

        They are reserved no longer: the caller reserves for the whole sequence, or frees them.
        """
        kept = self._kept.pop(sequence_id, None)
        if kept is None:
            return torch.empty(0, dtype=torch.int64, device=self._scheduler.device)
        self._table.expect_no_more(sequence_id)
        return kept

    def drop_left(self, sequence_ids: Collection[str]) -> None:
        """Drop what is still kept for sequences whose moves have ended."""
        for sequence_id in sequence_ids:
            if sequence_id in self._kept:
                self.drop(sequence_id)


def page_views(pool: PagePool, kv_indices: torch.Tensor, page_size: int) -> Iterator[torch.Tensor]:
    """Yield views of the pages at `kv_indices` [tokens], by layer, part and page."""
    pages = (kv_indices[::page_size].to(torch.int64) // page_size).tolist()
    for layer in range(pool.layer_num):
        for part in pool.page_parts(layer):
            for page in pages:
                yield part[page]
