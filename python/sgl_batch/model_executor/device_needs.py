"""Owns measuring the device memory that a loaded model needs: weights, working memory, the size of a page.

core/device_budget decides whether a budget holds it.
"""

from __future__ import annotations

import torch

from sgl_batch.config import BatchConfig
from sgl_batch.core.device_budget import ModelShape
from sgl_batch.core.gpu_reserves import GpuUse
from sgl_batch.core.model_numbers import KEPT_EXACT, Value, number, shape_of
from sgl_batch.core.partition_memory import partition_reserves
from sgl_batch.core.plan import Plan
from sgl_batch.distributed.rank_context import RankContext
from sgl_batch.kernel_loader import native_kernels
from sgl_batch.sglang_adapter.forward import decode_graph_rows
from sgl_batch.sglang_adapter.names import TRITON_ATTENTION
from sgl_batch.sglang_adapter.triton_attention import decode_kv_splits
from sgl_batch.sglang_adapter.types.messages import ServerArgs
from sgl_batch.sglang_adapter.types.scheduler import ModelConfig

_SCALE_BYTES = 4
_FLOAT_BYTES = 4
# The workspace that SGLang gives to attention backends, for metadata and partial results.
_WORKSPACE_BYTES = {"flashinfer": 512 << 20, "trtllm_mha": 512 << 20}


def resident_weight_bytes(model: torch.nn.Module, *, int8: bool = False) -> int:
    """Return the device memory of a model's weights while it runs.

    `int8`: weights of experts and linear layers will be rounded to int8. Parameters that share memory count once;
    parameters that stand for streamed weights count as nothing.
    """
    sizes: dict[int, int] = {}
    rounded = {
        name
        for name, weight in model.named_parameters()
        if int8 and weight.ndim >= 2 and not any(part in name for part in KEPT_EXACT)
    }
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        num_bytes = min(weight.nbytes, weight.untyped_storage().nbytes())
        if name in rounded and num_bytes == weight.nbytes:
            num_bytes = weight.numel() + _SCALE_BYTES * (weight.numel() // weight.shape[-1])
        sizes[weight.data_ptr()] = max(num_bytes, sizes.get(weight.data_ptr(), 0))
    return sum(sizes.values())


def model_shape(model_config: ModelConfig) -> ModelShape:
    """Return the shape that SGLang's model configuration describes; a field that it lacks counts as 0."""
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


def cpu_reserves(
    config: BatchConfig, plan: Plan, shape: ModelShape, rank_context: RankContext | None, *, can_split: bool
) -> dict[str, int]:
    """Return what a rank on a CPU keeps for partitions, in bytes by name. `can_split`: our loop runs its model."""
    if rank_context is None or not can_split or native_kernels() is None:
        return {}
    return partition_reserves(config, plan, shape, num_ranks=rank_context.topology.num_attention_ranks)


def gpu_use(
    server_args: ServerArgs,
    model_config: ModelConfig,
    rank_context: RankContext | None,
    *,
    decode_rows: int,
    processors: int,
) -> GpuUse:
    """Return what a rank with these arguments does on its GPU beyond computing its layers.

    `decode_rows`: sequences that have partial results of attention at once. `processors`: of the GPU.
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
