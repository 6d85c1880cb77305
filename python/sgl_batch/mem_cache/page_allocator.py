"""Owns which device pages are free, with SGLang's allocator interface. core/ decides which sequences take them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sgl_batch.sglang_adapter.memory import BaseTokenToKVPoolAllocator

_MOST_STAGED = 1 << 20


def _pages_for(tokens: torch.Tensor, page_size: int) -> torch.Tensor:
    return (tokens + page_size - 1) // page_size


class PageAllocator(BaseTokenToKVPoolAllocator):  # type: ignore[misc]
    """Gives KV indices of whole pages, in plain torch, on any device.

    Sequences never share a page that is still written to. Page 0 is kept for padding, so the last page is number
    `num_pages`. Pages to take are counted from lengths on the host, so that no step waits for a GPU. Staged pages are
    numbered from `first_staged` on, behind the device's own.
    """

    def __init__(
        self, size: int, page_size: int, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool
    ) -> None:
        super().__init__(size, page_size, dtype, device, kvcache, need_sort)
        self.num_pages = size // page_size
        self._decodes_staged = False
        self.clear()

    def clear(self) -> None:
        self.free_pages = torch.arange(1, self.num_pages + 1, dtype=torch.int64, device=self.device)
        self.release_pages = torch.empty(0, dtype=torch.int64, device=self.device)
        self.is_not_in_free_group = True
        self.free_group: list[torch.Tensor] = []

    @contextmanager
    def staging(self) -> Iterator[None]:
        """Inside, give KV indices of pages behind the device's own, counted from the first; they are never freed."""
        own = self.free_pages
        self.free_pages = torch.arange(self.first_staged, self.first_staged + _MOST_STAGED, device=self.device)
        try:
            yield
        finally:
            self.free_pages = own

    @contextmanager
    def decoding_staged(self) -> Iterator[None]:
        """Inside, every decoding sequence has consecutive staged pages: its next KV index follows its last one."""
        self._decodes_staged = True
        try:
            yield
        finally:
            self._decodes_staged = False

    @property
    def first_staged(self) -> int:
        """The number of the first staged page."""
        return self.num_pages + 1

    def _take(self, num_pages: int) -> torch.Tensor | None:
        if num_pages > len(self.free_pages):
            return None
        taken: torch.Tensor = self.free_pages[:num_pages]
        self.free_pages = self.free_pages[num_pages:]
        return taken

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Return KV indices [need_size] of whole pages, or None when too few are free."""
        assert need_size % self.page_size == 0, f"{need_size} tokens are not a whole number of pages"
        pages = self._take(need_size // self.page_size)
        if pages is None:
            return None
        offsets = torch.arange(self.page_size, device=self.device)
        kv_indices: torch.Tensor = (pages[:, None] * self.page_size + offsets).reshape(-1)
        return kv_indices

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Return KV indices [extend_num_tokens] for tokens prefix_lens..seq_lens of each sequence, laid end to end.

        A sequence first fills the page of `last_loc` (the KV index of its last token so far), then new pages.
        """
        size = self.page_size
        taken = self._take(int((_pages_for(seq_lens_cpu, size) - _pages_for(prefix_lens_cpu, size)).sum()))
        if taken is None:
            return None
        pages_before = _pages_for(prefix_lens, size)
        new_pages = _pages_for(seq_lens, size) - pages_before
        extend_lens = seq_lens - prefix_lens
        owner = torch.repeat_interleave(
            torch.arange(len(seq_lens), device=self.device), extend_lens, output_size=extend_num_tokens
        )
        row = torch.arange(extend_num_tokens, device=self.device)
        row -= (torch.cumsum(extend_lens, 0) - extend_lens)[owner]
        position = prefix_lens[owner] + row
        page_rank = position // size - pages_before[owner]
        first_new = torch.cumsum(new_pages, 0) - new_pages
        page = (last_loc // size)[owner]
        if len(taken):
            new_page = taken[(first_new[owner] + page_rank).clamp_(0, len(taken) - 1)]
            page = torch.where(page_rank >= 0, new_page, page)
        kv_indices: torch.Tensor = page * size + position % size
        return kv_indices

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Return KV indices [num_sequences]: one for the token at position seq_lens - 1 of each sequence."""
        kv_indices: torch.Tensor = last_loc.to(torch.int64) + 1
        if self._decodes_staged:
            return kv_indices
        taken = self._take(int(((seq_lens_cpu - 1) % self.page_size == 0).sum()))
        if taken is None:
            return None
        if not len(taken):
            return kv_indices
        opens_page = (seq_lens - 1) % self.page_size == 0
        new_page = taken[(torch.cumsum(opens_page, 0) - 1).clamp_(min=0)]
        return torch.where(opens_page, new_page * self.page_size, kv_indices)

    def free(self, free_index: torch.Tensor) -> None:
        """Free the pages of these KV indices."""
        if free_index.numel() == 0:
            return
        if not self.is_not_in_free_group:
            self.free_group.append(free_index)
            return
        pages = torch.unique(free_index.to(torch.int64) // self.page_size)
        pages = pages[pages < self.first_staged]
        # In front, so that pages written before are taken next. The kernel gives a page its memory at its first write:
        # so the pool takes memory for the most pages in use at once, not for all of them after a long run.
        self.free_pages = torch.cat((pages, self.free_pages))
