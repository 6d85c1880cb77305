"""Owns which device pages are free, with SGLang's allocator interface. Who may take them is decided in core/."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sgl_batch.sglang_adapter.memory import BaseTokenToKVPoolAllocator

_MOST_STAGED = 1 << 20


class PageAllocator(BaseTokenToKVPoolAllocator):  # type: ignore[misc]
    """Page-granular slots in plain torch, for machines without Triton.

    Sequences never share a page that is still written to. Page 0 is kept for padding, so the last page is
    number `num_pages`.
    """

    def __init__(
        self, size: int, page_size: int, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool
    ) -> None:
        super().__init__(size, page_size, dtype, device, kvcache, need_sort)
        self.num_pages = size // page_size
        self.clear()

    def clear(self) -> None:
        self.free_pages = torch.arange(1, self.num_pages + 1, dtype=torch.int64, device=self.device)
        self.release_pages = torch.empty(0, dtype=torch.int64, device=self.device)
        self.is_not_in_free_group = True
        self.free_group: list[torch.Tensor] = []

    @contextmanager
    def staging(self) -> Iterator[None]:
        """Inside, slots are those of pages behind the device's own, counted from the first; nobody gives them back."""
        own = self.free_pages
        self.free_pages = torch.arange(self.first_staged, self.first_staged + _MOST_STAGED)
        try:
            yield
        finally:
            self.free_pages = own

    @property
    def first_staged(self) -> int:
        """The number of the first page behind the device's own."""
        return self.num_pages + 1

    def _take(self, num_pages: int) -> torch.Tensor | None:
        if num_pages > len(self.free_pages):
            return None
        taken: torch.Tensor = self.free_pages[:num_pages]
        self.free_pages = self.free_pages[num_pages:]
        return taken

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Slots [need_size] of whole pages, or None when too few are free."""
        assert need_size % self.page_size == 0, f"{need_size} tokens are no whole number of pages"
        pages = self._take(need_size // self.page_size)
        if pages is None:
            return None
        offsets = torch.arange(self.page_size)
        slots: torch.Tensor = (pages[:, None] * self.page_size + offsets).reshape(-1)
        return slots

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
        """Slots [extend_num_tokens] for tokens prefix_lens..seq_lens of each sequence, laid end to end.

        A sequence first fills the page of `last_loc` (the slot of its last token so far), then new pages.
        """
        size = self.page_size
        pages_before = (prefix_lens + size - 1) // size
        new_pages = (seq_lens + size - 1) // size - pages_before
        taken = self._take(int(new_pages.sum()))
        if taken is None:
            return None
        extend_lens = seq_lens - prefix_lens
        owner = torch.repeat_interleave(torch.arange(len(seq_lens)), extend_lens)
        row = torch.arange(extend_num_tokens) - (torch.cumsum(extend_lens, 0) - extend_lens)[owner]
        position = prefix_lens[owner] + row
        page_rank = position // size - pages_before[owner]
        first_new = torch.cumsum(new_pages, 0) - new_pages
        in_new_page = page_rank >= 0
        page = (last_loc // size)[owner].clone()
        page[in_new_page] = taken[(first_new[owner] + page_rank)[in_new_page]]
        slots: torch.Tensor = page * size + position % size
        return slots

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """One slot [num_sequences] for the token at position seq_lens - 1 of each sequence.

        Pages behind the device's own lie one after the other in the order of their sequence.
        """
        staged = last_loc >= self.first_staged * self.page_size
        opens_page = ((seq_lens - 1) % self.page_size == 0) & ~staged
        taken = self._take(int(opens_page.sum()))
        if taken is None:
            return None
        slots: torch.Tensor = last_loc.to(torch.int64) + 1
        slots[opens_page] = taken * self.page_size
        return slots

    def free(self, free_index: torch.Tensor) -> None:
        """Give back the pages of these slots."""
        if free_index.numel() == 0:
            return
        if not self.is_not_in_free_group:
            self.free_group.append(free_index)
            return
        pages = torch.unique(free_index.to(torch.int64) // self.page_size)
        pages = pages[pages < self.first_staged]
        # In front: the next to be taken were written before. The kernel gives a page its memory at its first write, so
        # the pool holds what was once in use together, and not, after a long run, all of it.
        self.free_pages = torch.cat((pages, self.free_pages))
