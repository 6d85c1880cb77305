"""Adapts SGLang's Triton attention so that the metadata of several sub-batches is valid at the same time.

SGLang's metadata points into buffers that the next batch overwrites; ours has its own memory. It is tested on a CPU,
under Triton's interpreter, and has not yet run on a GPU.
"""

from __future__ import annotations

import copy
from typing import Any

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.layers import register_attention_backend
from sgl_batch.sglang_adapter.names import TRITON_ATTENTION

with bootstrap.importing():
    from sglang.srt.utils import get_int_env_var


def share_scratch(metadata: Any, first: Any) -> None:
    """Let a sub-batch's partial sums use the memory of its part's first sub-batch, which is the largest.

    Sub-batches attend one after the other, and latent attention has gigabytes of partial sums for each.
    """
    if metadata is first or metadata.attn_logits is None or len(metadata.attn_logits) > len(first.attn_logits):
        return
    metadata.attn_logits = first.attn_logits[: len(metadata.attn_logits)]
    metadata.attn_lse = first.attn_lse[: len(metadata.attn_lse)]


def register_triton_attention() -> None:
    """Register our Triton attention under SGLang's name for its own, in this process."""
    register_attention_backend(TRITON_ATTENTION)(_create)


def decode_kv_splits(server_args: Any, context_len: int, *, latent: bool, processors: int) -> int:
    """Return into how many parts SGLang's Triton attention may cut a decoding sequence, each with a partial result."""
    tile = server_args.triton_attention_split_tile_size
    if server_args.enable_deterministic_inference:
        tile = get_int_env_var("SGLANG_TRITON_DECODE_SPLIT_TILE_SIZE", 256)
    if tile is not None:
        return -(-context_len // int(tile))
    splits = int(server_args.triton_attention_num_kv_splits)
    if not latent:
        return splits
    # SGLang imports it when it is wanted: it needs Triton.
    from sglang.srt.layers.attention.triton_backend import _mla_decode_kv_splits_cap

    return int(_mla_decode_kv_splits_cap(splits, processors, context_len))


def _create(runner: Any) -> Any:
    # SGLang imports it when it is wanted: it needs Triton.
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    class TritonAttention(TritonAttnBackend):  # type: ignore[misc]
        """The metadata of each batch has its own memory, and its pages are those of the pool's redirected layers."""

        def init_forward_metadata(self, forward_batch: Any) -> None:
            if forward_batch.seq_lens_sum is None and forward_batch.forward_mode.is_decode():
                # The lengths are on the device only, so there must be room for the largest sum. SGLang's own bound is
                # the sum of sequences that are all as long as the model allows.
                sequences, pool_tokens = forward_batch.batch_size, self.token_to_kv_pool.size
                forward_batch = copy.copy(forward_batch)
                forward_batch.seq_lens_sum = sequences + min(pool_tokens, sequences * self.max_context_len)
            super().init_forward_metadata(forward_batch)
            metadata = self.forward_metadata
            # SGLang's tensors point into buffers that its next metadata overwrites.
            metadata.kv_indptr = metadata.kv_indptr.clone()
            if metadata.qo_indptr is not None:
                metadata.qo_indptr = metadata.qo_indptr.clone()
            if metadata.window_kv_indptr is not None:
                metadata.window_kv_indptr = metadata.window_kv_indptr.clone()
            first_page = getattr(self.token_to_kv_pool, "first_page", 0)
            if first_page:
                metadata.kv_indices = metadata.kv_indices - first_page * self.page_size
                if metadata.window_kv_indices is not None:
                    metadata.window_kv_indices = metadata.window_kv_indices - first_page * self.page_size

        def share_scratch(self, metadata: Any, first: Any) -> None:
            share_scratch(metadata, first)

    attention = TritonAttention(runner)
    if attention.sliding_window_size is not None and attention.sliding_window_size > 0:
        # SGLang counts the tokens before a row's own, and its decode metadata has no room for the row's own token.
        attention.sliding_window_size += 1
    return attention
