"""Owns attention over device pages on a CPU: ragged prefill with a cached prefix, and decode over flat pages.

Sub-batches and pages come with the forward batch. The native kernels compute if pages have their layout, torch
operators otherwise. Latent attention (MLA) is attention with one KV head, whose values are the first channels of its
keys. With a window, a row attends to that many tokens, its own included (0: to all up to its own); KV before the window
is kept. A sink is one more score of each query head, whose weight goes to no value.
Shape suffixes: B sequences, P pages of all sequences, T tokens, S tokens of a page, H KV heads, G query heads
per KV head, D head dimension, V head dimension of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from sgl_batch.errors import ConfigError
from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers.attention import native_paged
from sgl_batch.layers.attention.native_paged import PieceMetadata
from sgl_batch.layers.column_split import PassSplit
from sgl_batch.mem_cache.device_page_pool import DevicePagePool
from sgl_batch.mem_cache.latent_page_pool import LatentPagePool
from sgl_batch.sglang_adapter.layers import AttentionBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeMetadata:
    """The pages of all sequences of a sub-batch, one sequence after the other, and the sequence that owns each."""

    pages_P: torch.Tensor
    owner_P: torch.Tensor
    used_P: torch.Tensor  # the sequence's tokens from the page's first token on
    bias_PS: torch.Tensor
    num_pages_B: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillMetadata:
    """For each piece of a sequence: its rows [start, end), and the KV indices of its tokens up to its last row.

    None in place of KV indices: the piece begins its sequence, so that its rows are all its tokens.
    """

    rows: tuple[tuple[int, int], ...]
    kv_indices: tuple[torch.Tensor | None, ...]


def page_table(
    req_to_token: torch.Tensor,
    req_pool_indices_B: torch.Tensor,
    seq_lens_B: torch.Tensor,
    page_size: int,
    first_page: int = 0,
) -> DecodeMetadata:
    """Flatten the pages of sequences of `seq_lens_B` tokens. Page 0 is the pool's page `first_page`.

    The parts of a page past its sequence's end get a bias of -inf.
    """
    num_pages_B = (seq_lens_B + page_size - 1) // page_size
    owner_P = torch.repeat_interleave(torch.arange(len(seq_lens_B)), num_pages_B)
    rank_P = torch.arange(len(owner_P)) - (torch.cumsum(num_pages_B, 0) - num_pages_B)[owner_P]
    first_kv_index_P = req_to_token[req_pool_indices_B[owner_P], rank_P * page_size].to(torch.int64)
    used_P = seq_lens_B[owner_P] - rank_P * page_size
    bias_PS = torch.zeros(len(owner_P), page_size)
    bias_PS.masked_fill_(torch.arange(page_size) >= used_P[:, None], float("-inf"))
    pages_P = first_kv_index_P // page_size - first_page
    return DecodeMetadata(pages_P=pages_P, owner_P=owner_P, used_P=used_P, bias_PS=bias_PS, num_pages_B=num_pages_B)


def decode_attention(
    q_BHGD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    metadata: DecodeMetadata,
    scaling: float,
    window: int = 0,
    sinks_G: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with one query token per sequence to its pages; return float32 [B, H, G, V].

    Pages of all sequences are multiplied at once, then reduced to their sequences by a maximum and a sum, so that no
    row is padded to the longest sequence and no Python loop visits sequences.
    `k_pages`: [num_pages, H, S, D], `v_pages`: [num_pages, H, S, V]; `sinks_G`: [query heads].
    """
    owner_P = metadata.owner_P
    q_PHGD = (q_BHGD.float() * scaling)[owner_P]
    k_PHSD = k_pages.index_select(0, metadata.pages_P).float()
    scores_PHGS = torch.matmul(q_PHGD, k_PHSD.transpose(-1, -2))
    scores_PHGS += metadata.bias_PS[:, None, None, :]
    if window:
        before_PS = torch.arange(scores_PHGS.shape[-1]) < metadata.used_P[:, None] - window
        scores_PHGS.masked_fill_(before_PS[:, None, None, :], float("-inf"))
    top_BHG = torch.segment_reduce(scores_PHGS.amax(-1), "max", lengths=metadata.num_pages_B, axis=0)
    if sinks_G is not None:
        sinks_HG = sinks_G.float().view(top_BHG.shape[1:])
        top_BHG = torch.maximum(top_BHG, sinks_HG)
    weights_PHGS = scores_PHGS.sub_(top_BHG[owner_P][..., None]).exp_()
    v_PHSV = v_pages.index_select(0, metadata.pages_P).float()
    parts_PHGV = torch.matmul(weights_PHGS, v_PHSV)
    sums_BHG = torch.zeros_like(top_BHG).index_add_(0, owner_P, weights_PHGS.sum(-1))
    if sinks_G is not None:
        sums_BHG += (sinks_HG - top_BHG).exp()
    out_BHGV = torch.zeros(*top_BHG.shape, v_pages.shape[-1]).index_add_(0, owner_P, parts_PHGV)
    return out_BHGV / sums_BHG[..., None]


def prefill_attention(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THV: torch.Tensor,
    scaling: float,
    window: int = 0,
    sinks_G: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally with the last `len(q)` tokens of one sequence to all its tokens; return [T, heads, V].

    `k_THD`, `v_THV` may have more tokens than `q_THD`: the first ones are the cached prefix. `sinks_G`: [query heads].
    """
    num_q, num_kv, groups = q_THD.shape[0], k_THD.shape[0], q_THD.shape[1] // k_THD.shape[1]
    if groups > 1:
        k_THD, v_THV = (x[:, :, None].expand(-1, -1, groups, -1).flatten(1, 2) for x in (k_THD, v_THV))
    mask = None
    if num_q not in (1, num_kv) or 0 < window < num_kv or sinks_G is not None:
        mask = torch.ones(num_q, num_kv, dtype=torch.bool).tril_(num_kv - num_q)
    if mask is not None and window:
        mask = mask.triu_(num_kv - num_q - window + 1)
    if mask is not None and sinks_G is not None:
        return _attention_with_sinks(q_THD, k_THD, v_THV, scaling, mask, sinks_G)
    out = F.scaled_dot_product_attention(
        q_THD.transpose(0, 1)[None],
        k_THD.transpose(0, 1)[None],
        v_THV.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None and num_q > 1,
        scale=scaling,
    )
    return out[0].transpose(0, 1)


def _attention_with_sinks(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THV: torch.Tensor,
    scaling: float,
    visible_TT: torch.Tensor,
    sinks_G: torch.Tensor,
) -> torch.Tensor:
    """Compute attention with sinks in float32 by its definition: torch's own attention has no sinks."""
    q_HTD, k_HTD, v_HTV = (x.transpose(0, 1).float() for x in (q_THD, k_THD, v_THV))
    scores_HTT = (q_HTD @ k_HTD.mT * scaling).masked_fill_(~visible_TT, float("-inf"))
    sinks_HT1 = sinks_G.float()[:, None, None].expand(-1, len(q_THD), 1)
    weights_HTT = torch.cat((scores_HTT, sinks_HT1), -1).softmax(-1)[..., :-1]
    return (weights_HTT @ v_HTV).transpose(0, 1).to(q_THD.dtype)


class CpuPagedAttention(AttentionBackend):  # type: ignore[misc]
    """SGLang's attention backend interface over our page pools: multi-head, grouped-query and latent attention.

    `split`: in a pass that ranks share, each attends with some query heads. The native kernels do that; without them
    every rank attends with all.
    """

    def __init__(self, runner: Any, split: PassSplit | None = None) -> None:
        super().__init__()
        self.split = split or PassSplit()
        pool = runner.token_to_kv_pool
        if not isinstance(pool, (DevicePagePool, LatentPagePool)):
            raise ConfigError(
                f"this model keeps its KV in {type(pool).__name__}, which the CPU attention backend cannot read; "
                "it covers multi-head, grouped-query and latent attention, with one pool of KV for all layers"
            )
        self.pool: DevicePagePool | LatentPagePool = pool
        self.token_to_kv_pool = pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.req_to_token: torch.Tensor = runner.req_to_token_pool.req_to_token
        self.forward_metadata: DecodeMetadata | PrefillMetadata | PieceMetadata | None = None
        self._kernels = native_kernels() if pool.native_layout else None

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return False

    def init_forward_metadata(self, forward_batch: Any) -> None:
        if self._kernels is not None:
            self.forward_metadata = native_paged.pieces_of(
                forward_batch, self.req_to_token, self.pool.page_size, self.pool.first_page
            )
            return
        if forward_batch.forward_mode.is_decode():
            self.forward_metadata = page_table(
                self.req_to_token,
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                self.pool.page_size,
                self.pool.first_page,
            )
            return
        rows, kv_indices, start = [], [], 0
        extends = zip(
            forward_batch.req_pool_indices.tolist(),
            forward_batch.extend_prefix_lens_cpu,
            forward_batch.extend_seq_lens_cpu,
            strict=True,
        )
        for request, prefix, length in extends:
            rows.append((start, start + length))
            known = self.req_to_token[request, : prefix + length].to(torch.int64) if prefix else None
            kv_indices.append(None if known is None else known - self.pool.first_page * self.pool.page_size)
            start += length
        self.forward_metadata = PrefillMetadata(rows=tuple(rows), kv_indices=tuple(kv_indices))

    def of_last_rows(self, metadata: object, counts: Sequence[int], rows: torch.Tensor) -> object:
        """Return the metadata of a sub-batch of prompts in which so many of the last rows of each piece attend.

        `rows`: their numbers in the sub-batch. Without the native kernels all rows attend.
        """
        return metadata.of_last_rows(counts, rows) if isinstance(metadata, PieceMetadata) else metadata

    def _check(self, layer: Any, sinks: torch.Tensor | None, asked: dict[str, Any]) -> None:
        """Raise ConfigError for features that are not computed here, by name: no wrong tokens (invariant 3)."""
        latent = isinstance(self.pool, LatentPagePool)
        features = {
            "logit_cap": bool(layer.logit_cap),
            "sliding_window_size": latent and _window(layer) > 0,
            "is_cross_attention": layer.is_cross_attention,
            f"attn_type {layer.attn_type.value}": layer.attn_type.value != "decoder",
            "xai_temperature_len": layer.xai_temperature_len > 0,
            "k_scale": layer.k_scale is not None,
            "expanded latents": isinstance(self.pool, LatentPagePool) and layer.qk_head_dim != self.pool.row_dim,
            "sinks": latent and sinks is not None,
            **{name: value is not None for name, value in asked.items()},
        }
        present = [name for name, there in features.items() if there]
        if present:
            raise ConfigError(
                "the CPU attention backend covers causal attention over the whole context or, unless it is latent, a "
                "window of it with sinks; "
                f"this model asks for {', '.join(present)}"
            )

    def _save(self, layer: Any, forward_batch: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        self.pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)

    def _attend(self, q: torch.Tensor, layer: Any, pieces: PieceMetadata, sinks: torch.Tensor | None) -> torch.Tensor:
        if pieces.rows is not None:
            q = q[pieces.rows]
        rows, kernels = q if q.stride(-1) == 1 else q.contiguous(), self._kernels
        assert kernels is not None, "pieces are made for the native kernels"
        if isinstance(self.pool, LatentPagePool):
            return self._attend_latent(kernels, self.pool, rows, layer, pieces)
        pools = self.pool.get_kv_buffer(layer.layer_id)
        options: dict[str, Any] = {
            "page_size": self.pool.page_size,
            "head_dim": layer.qk_head_dim,
            "scaling": layer.scaling,
            "window": _window(layer),
            "sinks": sinks,
        }
        split, heads, width = self.split.current, layer.tp_q_head_num, layer.qk_head_dim
        if split is None or not split.pays(self._visited_bytes(pieces, pools), heads):
            return native_paged.attend(kernels, rows, pools, pieces, **options)
        return split.columns(
            heads * width,
            width,
            lambda first, last: native_paged.attend_heads(
                kernels, rows, pools, pieces, heads=(first // width, last // width), **options
            ),
        )

    def _visited_bytes(self, pieces: PieceMetadata, pools: Sequence[torch.Tensor]) -> int:
        """Return how much of a layer's keys and values the pieces read."""
        page_size: int = self.pool.page_size
        return pieces.visits * sum(pool[0].nbytes for pool in pools) // page_size

    def shares(self, pieces: PieceMetadata) -> bool:
        """Return whether the ranks of a shared pass over these pieces divide the heads, if there are enough of them.

        They always do where attention is latent.
        """
        split = self.split.current
        if split is None or isinstance(self.pool, LatentPagePool):
            return split is not None
        return split.pays(self._visited_bytes(pieces, self.pool.page_parts(0)), split.size)

    def _attend_latent(
        self, kernels: ModuleType, pool: LatentPagePool, q: torch.Tensor, layer: Any, pieces: PieceMetadata
    ) -> torch.Tensor:
        """Attend to latents. In a pass that ranks share, only this rank's heads have a result.

        The projection behind attention needs no others (`PackedWeights.by_head`).
        """
        pages, split = pool.get_pages(layer.layer_id), self.split.current
        options: dict[str, Any] = {"value_dim": layer.v_head_dim, "scaling": layer.scaling}
        if split is None:
            return native_paged.attend_latent(kernels, q, pages, pieces, **options)
        heads, width = layer.tp_q_head_num, layer.v_head_dim
        first, last = split.own(heads)
        out = q.new_empty(len(q), heads * width)
        if first < last:
            own = q[:, first * layer.qk_head_dim : last * layer.qk_head_dim]
            out[:, first * width : last * width] = native_paged.attend_latent(kernels, own, pages, pieces, **options)
        return out

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        sinks: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        self._check(layer, sinks, kwargs)
        q = _rows_of(q, layer)
        if save_kv_cache:
            self._save(layer, forward_batch, k, v)
        if isinstance(self.forward_metadata, PieceMetadata):
            return self._attend(q, layer, self.forward_metadata, sinks)
        assert isinstance(self.forward_metadata, DecodeMetadata), "decode runs under decode metadata"
        q_BHGD = q.view(q.shape[0], layer.tp_k_head_num, -1, layer.qk_head_dim)
        k_pages, v_pages = self.pool.pages_by_head(layer.layer_id)
        out = decode_attention(q_BHGD, k_pages, v_pages, self.forward_metadata, layer.scaling, _window(layer), sinks)
        return out.to(q.dtype).view(q.shape[0], -1)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        sinks: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        self._check(layer, sinks, kwargs)
        q = _rows_of(q, layer)
        if save_kv_cache:
            self._save(layer, forward_batch, k, v)
        if isinstance(self.forward_metadata, PieceMetadata):
            return self._attend(q, layer, self.forward_metadata, sinks)
        assert isinstance(self.forward_metadata, PrefillMetadata), "prefill runs under prefill metadata"
        q_THD = q.view(q.shape[0], layer.tp_q_head_num, layer.qk_head_dim)
        out_THV = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        for (start, end), kv_indices in zip(self.forward_metadata.rows, self.forward_metadata.kv_indices, strict=True):
            if kv_indices is None:
                keys, values = k[start:end], v[start:end]
            else:
                keys, values = self.pool.read_kv(layer.layer_id, kv_indices)
            out_THV[start:end] = prefill_attention(q_THD[start:end], keys, values, layer.scaling, _window(layer), sinks)
        return out_THV.view(q.shape[0], -1)


def _rows_of(q: torch.Tensor, layer: Any) -> torch.Tensor:
    """Return queries as [rows, heads * head_dim]; some of SGLang's models give a row for each head."""
    return q.reshape(-1, layer.tp_q_head_num * layer.qk_head_dim)


def _window(layer: Any) -> int:
    """Return how many tokens a row attends to, its own included; 0 is all.

    SGLang counts the tokens before the row's own, and has -1 for all.
    """
    size = layer.sliding_window_size
    return size + 1 if size is not None and size > 0 else 0
