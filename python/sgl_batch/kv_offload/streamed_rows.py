"""Owns where rows of a streamed decode group have their KV: store blocks, device pages, and the tables of attention.

How rows are cut into sub-batches is decided in core/decode_streaming.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from sgl_batch.core.decode_streaming import StreamedPart, StreamedRow, lay_out
from sgl_batch.core.page_ledger import pages_for
from sgl_batch.core.plan import Plan
from sgl_batch.kv_offload.decode_staging import PartCopies
from sgl_batch.kv_offload.stored_kv import StoredKV
from sgl_batch.sglang_adapter.host_copies import upload_copy
from sgl_batch.sglang_adapter.types.requests import Request
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler


@dataclass(slots=True, kw_only=True)
class _Row:
    """A row's sub-batch, and the page in a half for each of its sequence's pages, until the next layout."""

    part: int
    pages: list[int]


class StreamedRows:
    """The layout of the group, which lasts until a sequence joins or has used up its pages.

    `first_page`: the number of a half's first page in the tables, behind all pages that sequences can hold.
    `half_pages`: the pages of a half.
    """

    def __init__(
        self, scheduler: SGLangScheduler, stored: StoredKV, *, page_size: int, first_page: int, half_pages: int
    ) -> None:
        self._table: torch.Tensor = scheduler.req_to_token_pool.req_to_token
        self._stored, self._size = stored, page_size
        self._first_page, self._half_pages = first_page, half_pages
        self._parts: list[StreamedPart] = []
        self._rows: dict[str, _Row] = {}
        self._copies: dict[int, PartCopies] = {}

    def prepare(self, requests: Sequence[Request], plan: Plan, whole_pages: Callable[[Request], int]) -> None:
        """Lay out the group anew, unless each request has a page for its next token.

        `whole_pages` returns how many pages a request can need to its end.
        """
        if all(self._has_room(request) for request in requests):
            return
        size = self._size
        rows = []
        for request in requests:
            full = request.kv_committed_len // size
            blocks = tuple(self._stored.store_blocks_of(request.rid)[:full])
            own = pages_for(request.kv_committed_len + plan.boundary_tokens, size) - full
            rows.append(StreamedRow(store_blocks=blocks, own_pages=min(own, whole_pages(request) - full)))
        self._parts = lay_out(rows, half_pages=self._half_pages, most_rows=plan.decode.b_attn)
        self._rows = {
            requests[number].rid: _Row(part=index, pages=part.pages[number - part.start])
            for index, part in enumerate(self._parts)
            for number in range(part.start, part.end)
        }
        self._copies = {}
        for request in requests:
            self._lay_table(request)

    def _has_room(self, request: Request) -> bool:
        row = self._rows.get(request.rid)
        return row is not None and request.kv_committed_len < len(row.pages) * self._size

    def _lay_table(self, request: Request) -> None:
        pages = torch.tensor(self._rows[request.rid].pages) + self._first_page
        kv_indices = (pages[:, None] * self._size + torch.arange(self._size)).flatten()[: self._table.shape[1]]
        self._table[request.req_pool_idx, : len(kv_indices)] = upload_copy(
            kv_indices.to(self._table.dtype), self._table.device
        )

    def forget(self, name: str) -> None:
        """Forget a sequence that no longer runs. If it joins again, the group is laid out anew."""
        self._rows.pop(name, None)

    def copies(self, requests: Sequence[Request]) -> list[PartCopies]:
        """Return the copies of the coming step's sub-batches. Each request counts the step's token already."""
        size = self._size
        opening = [request.rid for request in requests if request.kv_committed_len % size == 1]
        self._stored.grow(opening)
        rows, changed, replaced = Counter[int](), set[int](), set[int]()
        for request in requests:
            part = self._rows[request.rid].part
            rows[part] += 1
            if (request.kv_committed_len - 1) % size <= 1:
                changed.add(part)
            if self._stored.is_replaced(request.rid):
                replaced.add(part)
        start, made = 0, []
        for index in sorted(rows):
            span = (start, start + rows[index])
            known = self._copies.pop(index, None)
            if known is None or index in changed | replaced or known.num_rows != rows[index]:
                known = self._copies_of(requests[slice(*span)], self._parts[index])
            made.append(replace(known, span=span))
            if index not in replaced:  # the next step reads its own block
                self._copies[index] = known
            start = span[1]
        return made

    def _copies_of(self, requests: Sequence[Request], part: StreamedPart) -> PartCopies:
        size = self._size
        load: dict[int, int] = {}  # by page
        store_pages, store_blocks = [], []
        for request in requests:
            pages, blocks = self._rows[request.rid].pages, self._stored.store_blocks_of(request.rid)
            last, tokens = divmod(request.kv_committed_len - 1, size)
            load.update(zip(pages[:last], blocks[:last], strict=True))
            if tokens:
                load[pages[last]] = self._stored.open_block_to_read(request.rid)
            store_pages.append(pages[last])
            store_blocks.append(blocks[last])
        return PartCopies(
            span=(0, len(requests)),
            part=part,
            load_blocks=torch.tensor(list(load.values()), dtype=torch.int64),
            load_pages=torch.tensor(list(load), dtype=torch.int64),
            store_pages=torch.tensor(store_pages, dtype=torch.int64),
            store_blocks=torch.tensor(store_blocks, dtype=torch.int64),
        )
