"""Owns the regimes in which everything fits the device: long prompts, plain decode, and with or without
accumulation.
"""

from __future__ import annotations

from typing import Any

from comparison.workload import Workload

from gpu_comparison.cases import Regime, Role
from gpu_comparison.goals import GOALS
from gpu_comparison.run_setup import DEFAULT_STOCK, RunSetup
from gpu_comparison.shapes import ModelShape
from gpu_comparison.sizes import Sizes


def prefill(sizes: Sizes, shape: ModelShape, workload: Workload, setup: RunSetup) -> Regime:
    """Make the regime of long prompts: large expert groups, by DeepGEMM on a GPU."""
    chunks = (256, 1024) if setup.tiny else (16384, 32768)
    rows = (512, 2048) if setup.tiny else (8192, 32768)
    group: dict[str, Any] = {"b_attn_prefill": rows[0], "b_moe_prefill": rows[1]}
    memory: dict[str, Any] = {"mem_fraction_static": 0.88} if setup.on_gpu else {}
    deep = {**memory, **group, "expert_runner": "deepgemm" if setup.on_gpu else "auto"}
    fast = {"overlap": "on", **setup.graphs(on=True)}

    def chunked(chunk: int) -> dict[str, Any]:
        return {**memory, "chunked_prefill_size": chunk, "max_prefill_tokens": chunk}

    return Regime(
        name="prefill",
        title=f"prompts of {sizes.input_len:,} tokens, {sizes.output_len:,} generated",
        shape=shape,
        workload=workload,
        cases=(
            *setup.switched("DeepGEMM" if setup.on_gpu else "large groups", **deep),
            setup.stock(DEFAULT_STOCK),
            *(setup.stock(f"chunks of {chunk}", **chunked(chunk)) for chunk in chunks),
            setup.stock(
                f"chunks of {chunks[0]}, DeepGEMM", gpu_only=True, **chunked(chunks[0]), moe_runner_backend="deep_gemm"
            ),
            setup.ours(
                "SGLang's experts", role=Role.REFERENCE, gpu_only=True, **{**deep, "expert_runner": "sglang"}, **fast
            ),
            setup.ours("Triton", role=Role.REFERENCE, gpu_only=True, **{**deep, "expert_runner": "triton"}, **fast),
        ),
        goals=GOALS["prefill"],
    )


def resident(sizes: Sizes, shape: ModelShape, workload: Workload, setup: RunSetup) -> Regime:
    """Make the regime with all KV and weights on the device and one sub-batch, in which we can only lose."""
    running: dict[str, Any] = {"max_running_requests": sizes.num_prompts}
    memory: dict[str, Any] = {"mem_fraction_static": 0.88} if setup.on_gpu else {}
    most: dict[str, Any] = {"cuda_graph_max_bs_decode": sizes.num_prompts}
    group: dict[str, Any] = {"b_attn_decode": sizes.num_prompts, "b_moe_decode": sizes.num_prompts}
    chosen: dict[str, Any] = {"overlap": "on", **setup.graphs(on=True), "decode_forward": "measure"}
    chunk = 1024 if setup.tiny else 16384
    return Regime(
        name="resident",
        title=f"{sizes.num_prompts} sequences, all of whose KV fits the device",
        shape=shape,
        workload=workload,
        cases=(
            setup.ours("as its self-check chooses", gpu_only=True, **{**memory, **most, **group, **chosen}),
            *setup.switched("one sub-batch", **memory, **most, **group),
            setup.stock(DEFAULT_STOCK),
            setup.stock("graphs for all", gpu_only=True, **memory, **running, **most),
            setup.stock(f"chunks of {chunk}", **memory, **running, chunked_prefill_size=chunk),
        ),
        goals=GOALS["resident"],
    )


def accumulation(sizes: Sizes, shape: ModelShape, workload: Workload, setup: RunSetup) -> Regime:
    """Make the regime that compares one expert call per group with one per sub-batch, without graphs."""
    return _accumulation("accumulation", sizes, shape, workload, setup, graphs=False)


def accumulation_graphs(sizes: Sizes, shape: ModelShape, workload: Workload, setup: RunSetup) -> Regime:
    """Make the same regime with CUDA graphs."""
    return _accumulation("accumulation-graphs", sizes, shape, workload, setup, graphs=True)


def _accumulation(
    name: str, sizes: Sizes, shape: ModelShape, workload: Workload, setup: RunSetup, *, graphs: bool
) -> Regime:
    """Return cases with the same engine, KV, limit of requests, prefill groups, overlap and graphs."""
    small = max(1, sizes.num_prompts // 8)
    rows = (256, 1024) if setup.tiny else (2048, 16384)
    same: dict[str, Any] = {
        "max_total_tokens": -(-sizes.need_tokens // 1024) * 1024 + 64 * sizes.num_prompts,
        "max_running_requests": 2 * sizes.num_prompts,
        "b_attn_prefill": rows[0],
        "b_moe_prefill": rows[1],
        "b_attn_decode": small,
        "overlap": "off",
        # Groups of other sizes would be measured separately, and may get another runner.
        "expert_runner": "sglang" if setup.on_gpu else "auto",
        **setup.graphs(on=graphs),
        # Otherwise SGLang's own graphs would serve only the groups of one sub-batch.
        "decode_forward": "coroutine",
    }
    group = {**same, "b_moe_decode": sizes.num_prompts}
    return Regime(
        name=name,
        title=f"groups of {sizes.num_prompts} sequences, attention by {small}: one expert call for the group, or not"
        f"; {'CUDA graphs' if graphs else 'no graphs'} in all",
        shape=shape,
        workload=workload,
        cases=(
            setup.ours(f"the plan: b_attn {small}, b_moe {sizes.num_prompts}", gpu_only=graphs, **group),
            setup.ours("accumulation off", role=Role.PEER, gpu_only=graphs, **group, accumulate=False),
            setup.ours(f"b_moe = b_attn = {small}", role=Role.PEER, gpu_only=graphs, **same, b_moe_decode=small),
        ),
        notes=(
            "All are sgl_batch with the same memory for KV, limit of requests, prefill groups, overlap and graphs. "
            "`accumulation off` calls the experts once a sub-batch in both phases; `b_moe = b_attn` runs an eighth of "
            "the sequences at once and prefills as the plan does.",
        ),
    )
