"""Owns finding out what a loaded model takes of its device: weights, working memory, the size of a page.

Whether a budget holds it is decided in core/device_budget.
"""

from __future__ import annotations

import torch

from sgl_batch.core.device_budget import ModelShape
from sgl_batch.core.gpu_reserves import GpuUse
from sgl_batch.core.model_numbers import KEPT_EXACT, Value, number, shape_of
from sgl_batch.distributed.rank_context import RankContext
from sgl_batch.sglang_adapter.forward import decode_graph_rows
from sgl_batch.sglang_adapter.names import TRITON_ATTENTION
from sgl_batch.sglang_adapter.triton_attention import decode_kv_splits
from sgl_batch.sglang_adapter.types.messages import ServerArgs
from sgl_batch.sglang_adapter.types.scheduler import ModelConfig

_SCALE_BYTES = 4
_FLOAT_BYTES = 4
# What flashinfer's plans and partial results take, as SGLang gives it.
_WORKSPACE_BYTES = {"flashinfer": 512 << 20, "trtllm_mha": 512 << 20}


def resident_weight_bytes(model: torch.nn.Module, *, int8: bool = False) -> int:
    """What the weights of a model take of the device for as long as it runs.

    `int8`: those of experts and linear layers will be rounded. Parameters that share memory count once; those that only
    stand for streamed ones have none.
    """
    sizes: dict[int, int] = {}
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        num_bytes = min(weight.nbytes, weight.untyped_storage().nbytes())
        if int8 and num_bytes == weight.nbytes and weight.ndim >= 2 and not any(part in name for part in KEPT_EXACT):
            num_bytes = weight.numel() + _SCALE_BYTES * (weight.numel() // weight.shape[-1])
        sizes[weight.data_ptr()] = max(num_bytes, sizes.get(weight.data_ptr(), 0))
    return sum(sizes.values())


def model_shape(model_config: ModelConfig) -> ModelShape:
    """The shape of SGLang's model configuration; what it does not have counts as nothing."""
    return shape_of(
        _values(model_config),
        hidden=model_config.hidden_size,
        vocabulary=model_config.vocab_size,
        layers=model_config.num_hidden_layers,
        head_dim=max(model_config.head_dim, model_config.v_head_dim),
        item_bytes=model_config.dtype.itemsize,
    )


def _values(model_config: ModelConfig) -> Value:
    return lambda name: getattr(model_config.hf_text_config, name, None)


def gpu_use(
    server_args: ServerArgs,
    model_config: ModelConfig,
    rank_context: RankContext | None,
    *,
    decode_rows: int,
    processors: int,
) -> GpuUse:
    """What a rank with these arguments does on its GPU, which has so many processors, beside computing its layers.

    `decode_rows`: sequences that have partial results of attention at once.
    """
    row_bytes, backend = 0, server_args.attention_backend
    if backend == TRITON_ATTENTION:
        latent = number(_values(model_config), "kv_lora_rank")
        splits = decode_kv_splits(server_args, model_config.context_len, latent=latent > 0, processors=processors)
        heads = number(_values(model_config), "num_attention_heads")
        row_bytes = heads * splits * ((latent or model_config.v_head_dim) + 1) * _FLOAT_BYTES
    return GpuUse(
        shares_gpu=rank_context is not None and rank_context.shares_gpu,
        exchanges=rank_context is not None and not rank_context.shares_gpu,
        decode_rows=decode_rows,
        graph_rows=decode_graph_rows(server_args),
        attention_row_bytes=row_bytes,
        attention_workspace_bytes=_WORKSPACE_BYTES.get(backend or "", 0),
    )
