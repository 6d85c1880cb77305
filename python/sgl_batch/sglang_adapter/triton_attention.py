"""SGLang's Triton attention, made so that the plans of several sub-batches hold side by side. Not yet run on a GPU.

It runs on a CPU under Triton's interpreter, which is how this is tested.
"""

from __future__ import annotations

import copy
from typing import Any

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.layers import register_attention_backend
from sgl_batch.sglang_adapter.names import TRITON_ATTENTION

with bootstrap.importing():
    from sglang.srt.utils import get_int_env_var


def share_scratch(plan: Any, first: Any) -> None:
    """Let a sub-batch's partial sums lie where those of its part's first, and largest, do.

    Sub-batches attend one after the other, and latent attention has gigabytes of these for each.
    """
    if plan is first or plan.attn_logits is None or len(plan.attn_logits) > len(first.attn_logits):
        return
    plan.attn_logits = first.attn_logits[: len(plan.attn_logits)]
    plan.attn_lse = first.attn_lse[: len(plan.attn_lse)]


def register_triton_attention() -> None:
    """In this process, let SGLang's name for its Triton attention stand for ours."""
    register_attention_backend(TRITON_ATTENTION)(_create)


def decode_kv_splits(server_args: Any, context_len: int, *, latent: bool, processors: int) -> int:
    """Into how many parts SGLang's Triton attention may cut a decoding sequence, each with a partial result."""
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
        """Each plan has memory of its own, and pages where the pool's layers are led to."""

        def init_forward_metadata(self, forward_batch: Any) -> None:
            if forward_batch.seq_lens_sum is None and forward_batch.forward_mode.is_decode():
                # Its lengths are on the device alone: room for all that they may come to. SGLang's own bound is that of
                # sequences which are all as long as the model allows.
                sequences, slots = forward_batch.batch_size, self.token_to_kv_pool.size
                forward_batch = copy.copy(forward_batch)
                forward_batch.seq_lens_sum = sequences + min(slots, sequences * self.max_context_len)
            super().init_forward_metadata(forward_batch)
            plan = self.forward_metadata
            # SGLang's point into buffers that its next plan overwrites.
            plan.kv_indptr = plan.kv_indptr.clone()
            if plan.qo_indptr is not None:
                plan.qo_indptr = plan.qo_indptr.clone()
            if plan.window_kv_indptr is not None:
                plan.window_kv_indptr = plan.window_kv_indptr.clone()
            first_page = getattr(self.token_to_kv_pool, "first_page", 0)
            if first_page:
                plan.kv_indices = plan.kv_indices - first_page * self.page_size
                if plan.window_kv_indices is not None:
                    plan.window_kv_indices = plan.window_kv_indices - first_page * self.page_size

        def share_scratch(self, plan: Any, first: Any) -> None:
            share_scratch(plan, first)

    attention = TritonAttention(runner)
    if attention.sliding_window_size is not None and attention.sliding_window_size > 0:
        # SGLang counts the tokens before a row's own, and its plans of decode leave no room for that one.
        attention.sliding_window_size += 1
    return attention
