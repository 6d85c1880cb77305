"""Owns the regimes in which memory is scarce: KV beyond the device's, weights that leave little, weights beyond it.

Stock is tuned by a small sweep: its own defaults, and one change to them at a time.
"""

from __future__ import annotations

from typing import Any

from comparison.workload import Workload

from gpu_comparison.cases import Case, Regime, Role
from gpu_comparison.goals import GOALS
from gpu_comparison.run_setup import DEFAULT_STOCK, RunSetup
from gpu_comparison.shapes import ModelShape
from gpu_comparison.sizes import GIB, Sizes
from sgl_batch.byte_sizes import format_bytes
from sgl_batch.errors import ConfigError

_OFFLOAD_BESIDE_GIB = 4  # of a device budget, for everything but weights and KV


def _hierarchical(store_bytes: int, pool_bytes: int) -> dict[str, Any]:
    """Return the settings of stock's cache in host memory, as large as our store."""
    return {"enable_hierarchical_cache": True, "hicache_ratio": max(1.1, round(store_bytes / pool_bytes, 1))}


def kv(sizes: Sizes, shape: ModelShape, workload: Workload, setup: RunSetup) -> Regime:
    """Make the regime with ten times the KV that the device holds."""
    pool: dict[str, Any] = {"max_total_tokens": sizes.pool_tokens}
    pool_bytes = sizes.pool_tokens * shape.kv_token_bytes
    chunk = 512 if setup.tiny else 16384
    return Regime(
        name="kv",
        title=f"KV on the device: {sizes.pool_tokens:,} tokens ({format_bytes(pool_bytes)}); all sequences need "
        f"{sizes.need_tokens / sizes.pool_tokens:.1f} times that",
        shape=shape,
        workload=workload,
        cases=(
            *setup.switched("host KV store", **pool, kv_store_bytes=sizes.store_bytes),
            setup.stock(DEFAULT_STOCK, **pool),
            setup.stock("hierarchical cache", gpu_only=True, **pool, **_hierarchical(sizes.store_bytes, pool_bytes)),
            setup.stock("half as conservative", **pool, schedule_conservativeness=0.5),
            setup.stock(f"chunks of {chunk}", **pool, chunked_prefill_size=chunk, max_prefill_tokens=chunk),
            setup.ours("no store", role=Role.REFERENCE, **pool),
        ),
        goals=GOALS["kv"],
        notes=("The pool is fixed for all, so that mem_fraction_static decides nothing.",),
    )


def tight(sizes: Sizes, shape: ModelShape, workload: Workload, setup: RunSetup) -> Regime:
    """Make the regime in which weights leave little for KV; at a tiny scale the pool's size is given."""
    pool: dict[str, Any] = {} if setup.full_gpu else {"max_total_tokens": sizes.pool_tokens}

    def memory(fraction: float) -> dict[str, Any]:
        return {**pool, "mem_fraction_static": fraction if setup.full_gpu else 0.5}

    left = max(int(0.9 * setup.gpu_bytes) - shape.weight_bytes, GIB)
    return Regime(
        name="tight",
        title=f"{shape.weight_bytes / 1e9:.0f} GB of weights on a device of {setup.gpu_bytes / 1e9:.0f} GB"
        if setup.full_gpu
        else f"KV on the device: {sizes.pool_tokens:,} tokens, said and not left by the weights",
        shape=shape,
        workload=workload,
        cases=(
            *setup.switched("host KV store", **memory(0.92), kv_store_bytes=sizes.store_bytes),
            setup.stock(DEFAULT_STOCK, **pool),
            setup.stock("mem_fraction_static 0.92", **memory(0.92)),
            setup.stock("0.95, graphs to 64", gpu_only=True, **memory(0.95), cuda_graph_max_bs_decode=64),
            setup.stock("0.92, chunks of 4096", **memory(0.92), chunked_prefill_size=4096),
            setup.stock(
                "0.92, hierarchical cache", gpu_only=True, **memory(0.92), **_hierarchical(sizes.store_bytes, left)
            ),
            setup.ours("no store", role=Role.REFERENCE, **memory(0.92)),
        ),
        goals=GOALS["tight"],
    )


def weights(sizes: Sizes, shape: ModelShape, workload: Workload, setup: RunSetup) -> Regime:
    """Make a device smaller than the weights: by mem_fraction_static, at a tiny scale by the expert slots."""
    kv_tokens = -(-sizes.need_tokens // 1024) * 1024 + 64 * sizes.num_prompts
    beside = kv_tokens * shape.kv_token_bytes + (_OFFLOAD_BESIDE_GIB * GIB if setup.full_gpu else 0)
    shared: dict[str, Any] = {"load_format": "auto", "max_total_tokens": kv_tokens}
    budget = dict(shared)
    if setup.full_gpu:
        budget["mem_fraction_static"] = round(sizes.budget_bytes / setup.gpu_bytes, 3)
    ours: dict[str, Any] = {
        **budget,
        "b_moe_decode": sizes.num_prompts,
        "b_attn_decode": min(256, sizes.num_prompts),
        "weights": "streamed",
        "weight_memory": _slot_bytes(sizes, shape, beside, setup),
    }
    running = {"max_running_requests": sizes.num_prompts}
    # Stock keeps as many weights on the device as the same KV leaves room for.
    offload = max(1, -(-(shape.weight_bytes + beside - sizes.budget_bytes) // GIB))
    return Regime(
        name="weights",
        title=f"{format_bytes(shape.weight_bytes)} of weights, a device budget of {format_bytes(sizes.budget_bytes)}",
        shape=shape,
        workload=workload,
        cases=(
            setup.ours("experts streamed, overlap", **ours, overlap="on"),
            setup.ours("experts streamed", **ours, overlap="off"),
            *_offloading(setup, {**budget, **running}, offload),
            setup.stock("all weights on the device, no budget", role=Role.REFERENCE, **{**shared, **running}),
        ),
        goals=GOALS["weights"],
        checkpoint=True,
        notes=(
            "Both engines load the same checkpoint, as streamed experts are read from files.",
            "No graphs with streamed experts: a captured graph cannot fetch them.",
        ),
    )


def _offloading(setup: RunSetup, budget: dict[str, Any], offload_gib: int) -> tuple[Case, ...]:
    """Return the ways in which stock computes with more weights than the device holds."""
    name, some = f"cpu_offload_gb {offload_gib}", {**budget, "cpu_offload_gb": offload_gib}
    groups = {"offload_group_size": 2, "offload_num_in_group": 1, "offload_prefetch_step": 1, "offload_mode": "cpu"}
    return (
        setup.stock(name, gpu_only=True, **some),
        setup.stock(f"{name}, no graphs", gpu_only=True, **some, disable_cuda_graph=True),
        setup.stock("layer groups offloaded", gpu_only=True, **{**budget, **groups}),
    )


def _slot_bytes(sizes: Sizes, shape: ModelShape, beside_bytes: int, setup: RunSetup) -> int:
    """Return the memory for streamed experts. Raises ConfigError if the budget leaves less than two layers need."""
    least = 2 * shape.experts * shape.expert_bytes
    if not setup.full_gpu:
        return least
    experts = sizes.budget_bytes - (shape.weight_bytes - shape.all_expert_bytes) - beside_bytes
    if experts < least:
        raise ConfigError(
            f"a device budget of {sizes.budget_bytes / GIB:.0f} GiB leaves {experts / GIB:.1f} GiB for experts beside "
            f"{beside_bytes / GIB:.1f} GiB of KV and working memory, less than two layers' ({least / GIB:.1f} GiB): "
            "lower --num-prompts, --input-len or --output-len"
        )
    return experts
