"""Owns sequences whose KV lies in scattered pages of a real pool, and dense attention in float64 to compare with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sgl_batch.layers.attention.cpu_paged import CpuPagedAttention
from sgl_batch.mem_cache.device_page_pool import DevicePagePool
from sgl_batch.mem_cache.latent_page_pool import LatentPagePool

HEAD_DIM, LATENT_DIM, SCALING = 16, 12, 0.3
POISON = 1e6  # finite, but so large that a share of 1e-6 of it would show


class PagedSequences:
    """Queries, keys and values [tokens, heads, dim] of sequences, and pages for them in a poisoned pool.

    Row b of `req_to_token` is sequence b; the pool holds `POISON` wherever nothing has been written, page 0
    included, and `spare_pages` belong to no sequence.
    """

    def __init__(
        self,
        lengths: list[int],
        *,
        page_size: int = 8,
        groups: int = 2,
        kv_heads: int = 2,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        page_seed: int = 0,
        spare_pages: int = 3,
        window: int = 0,
        sinks: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(length: int, heads: int) -> torch.Tensor:
            return torch.randn(length, heads, HEAD_DIM, generator=generator).to(dtype)

        self.lengths, self.window = lengths, window
        self.sinks = torch.linspace(-3, 5, kv_heads * groups) if sinks else None
        self.q = [draw(length, kv_heads * groups) for length in lengths]
        self.k = [draw(length, kv_heads) for length in lengths]
        self.v = self._values([draw(length, kv_heads) for length in lengths])
        self.pool = self._pool(page_size, kv_heads, dtype, spare_pages)
        self.req_to_token = self._scatter(page_size, spare_pages, page_seed)
        value_dim = self.v[0].shape[-1]
        self.layer = RadixAttention(
            kv_heads * groups,
            HEAD_DIM,
            SCALING,
            kv_heads,
            layer_id=1,
            sliding_window_size=window - 1,  # SGLang counts the tokens before a row's own
            v_head_dim=value_dim,
        )
        self.backend = CpuPagedAttention(
            SimpleNamespace(
                token_to_kv_pool=self.pool, req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token)
            )
        )

    def _values(self, drawn: list[torch.Tensor]) -> list[torch.Tensor]:
        return drawn

    def _num_pages(self, page_size: int) -> list[int]:
        return [-(-length // page_size) for length in self.lengths]

    def _pool(
        self, page_size: int, kv_heads: int, dtype: torch.dtype, spare_pages: int
    ) -> DevicePagePool | LatentPagePool:
        size = (sum(self._num_pages(page_size)) + spare_pages) * page_size
        pool = DevicePagePool(size, page_size, dtype, kv_heads, HEAD_DIM, 2, "cpu", False)
        for pages in (*pool.k_pages, *pool.v_pages):
            pages.fill_(POISON)
        return pool

    def _scatter(self, page_size: int, spare_pages: int, page_seed: int) -> torch.Tensor:
        counts = self._num_pages(page_size)
        order = torch.randperm(sum(counts) + spare_pages, generator=torch.Generator().manual_seed(page_seed)) + 1
        table = torch.zeros(len(counts), max(counts) * page_size, dtype=torch.int32)
        for row, pages in enumerate(order[: sum(counts)].split(counts)):
            kv_indices = (pages[:, None] * page_size + torch.arange(page_size)).reshape(-1)
            table[row, : self.lengths[row]] = kv_indices[: self.lengths[row]].to(torch.int32)
        return table

    def share(self, leader: int, follower: int, tokens: int) -> None:
        """Let one sequence begin with whole pages of another's, and with their keys and values."""
        self.req_to_token[follower, :tokens] = self.req_to_token[leader, :tokens]
        self.k[follower][:tokens], self.v[follower][:tokens] = self.k[leader][:tokens], self.v[leader][:tokens]

    def write(self, upto: list[int]) -> None:
        """Put the first `upto` keys and values of each sequence into the pool."""
        for row, tokens in enumerate(upto):
            kv_indices = self.req_to_token[row, :tokens].to(torch.int64)
            self.pool.set_kv_buffer(self.layer, kv_indices, self.k[row][:tokens], self.v[row][:tokens])

    def rows(self, spans: dict[int, tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens [start, end) of some sequences, end to end, as SGLang's layer hands them over: queries flat."""
        q, k, v = (
            torch.cat([which[row][start:end] for row, (start, end) in spans.items()])
            for which in (self.q, self.k, self.v)
        )
        return q.flatten(1), k, v

    def batch(self, mode: ForwardMode, spans: dict[int, tuple[int, int]]) -> ForwardBatch:
        """The forward batch that computes tokens [start, end) of each sequence, by row."""
        ends = torch.tensor([end for _, end in spans.values()])
        kv_indices = torch.cat([self.req_to_token[row, start:end] for row, (start, end) in spans.items()])
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(spans),
            input_ids=torch.zeros(len(kv_indices), dtype=torch.int64),
            req_pool_indices=torch.tensor(list(spans)),
            seq_lens=ends,
            out_cache_loc=kv_indices.to(torch.int64),
            seq_lens_sum=int(ends.sum()),
        )
        batch.extend_prefix_lens_cpu = [start for start, _ in spans.values()]
        batch.extend_seq_lens_cpu = [end - start for start, end in spans.values()]
        return batch

    def attend(
        self, mode: ForwardMode, spans: dict[int, tuple[int, int]], *, save_kv_cache: bool = True
    ) -> torch.Tensor:
        """Run the backend over these tokens; returns [tokens, heads * dim]."""
        batch = self.batch(mode, spans)
        self.backend.init_forward_metadata(batch)
        forward = self.backend.forward_decode if mode.is_decode() else self.backend.forward_extend
        options = {} if self.sinks is None else {"sinks": self.sinks}
        return forward(*self.rows(spans), self.layer, batch, save_kv_cache, **options)

    def expected(self, spans: dict[int, tuple[int, int]]) -> torch.Tensor:
        """The same by dense causal attention in float64."""
        parts = [
            dense_attention(self.q[row][start:end], self.k[row][:end], self.v[row][:end], self.window, self.sinks)
            for row, (start, end) in spans.items()
        ]
        return torch.cat(parts).flatten(1)


class LatentSequences(PagedSequences):
    """The same of latent attention: one row for all heads, whose first channels are the value."""

    def __init__(self, lengths: list[int], *, heads: int = 3, **options: Any) -> None:
        super().__init__(lengths, groups=heads, kv_heads=1, **options)

    def _values(self, drawn: list[torch.Tensor]) -> list[torch.Tensor]:
        return [keys[..., :LATENT_DIM] for keys in self.k]

    def _pool(self, page_size: int, kv_heads: int, dtype: torch.dtype, spare_pages: int) -> LatentPagePool:
        size = (sum(self._num_pages(page_size)) + spare_pages) * page_size
        pool = LatentPagePool(size, page_size, dtype, LATENT_DIM, HEAD_DIM - LATENT_DIM, 2, "cpu", False)
        for pages in pool.pages:
            pages.fill_(POISON)
        return pool


def dense_attention(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THV: torch.Tensor,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the last `len(q)` of `len(k)` tokens, head by head, in float64; returns [T, heads, V].

    A row sees `window` tokens, or all with 0; a head's sink is one more score, of which the value is zero.
    """
    groups = q_THD.shape[1] // k_THD.shape[1]
    first = len(k_THD) - len(q_THD)
    out = torch.empty(*q_THD.shape[:2], v_THV.shape[2], dtype=torch.float64)
    for head in range(q_THD.shape[1]):
        scores = q_THD[:, head].double() @ k_THD[:, head // groups].double().T * SCALING
        behind = torch.arange(first, len(k_THD))[:, None] - torch.arange(len(k_THD))
        visible = (behind >= 0) & (behind < (window or len(k_THD)))
        sink = torch.as_tensor(float("-inf") if sinks is None else sinks[head]).double().expand(len(q_THD), 1)
        weights = torch.cat((scores.masked_fill(~visible, float("-inf")), sink), 1).softmax(-1)[:, :-1]
        out[:, head] = weights @ v_THV[:, head // groups].double()
    return out
