"""Owns the engines that are compared. What their kernels reach is assumed, the same where nothing differs."""

from __future__ import annotations

from dataclasses import replace

from sgl_batch.errors import ConfigError
from sgl_batch.planner.candidate import DEVICE, INCLUSIVE, STREAMED
from sgl_batch.simulator.cluster.assumed import NOTHING, Assumed
from sgl_batch.simulator.cluster.engine_settings import ALL_TO_ALL, GATHER, EngineSettings
from sgl_batch.simulator.cluster.regime import DATA_PARALLEL, EXPERT_PARALLEL, HOST

_GIB = float(1 << 30)
_TABLE_2 = "BatchGen, Table 2"
_TABLES = "(measured kernels in the tables of aiconfigurator-core 0.12)"

BATCHGEN = EngineSettings(
    name="batchgen",
    title="BatchGen",
    reserve_bytes=Assumed(4 * _GIB, 2.5 * _GIB, 8 * _GIB, "process, workspaces, rings of experts, a pass"),
    ranks_reserve_bytes=Assumed(6 * _GIB, 3 * _GIB, 10 * _GIB, "buffers of the exchange"),
    host_reserve_bytes=Assumed(100e9, 50e9, 300e9, "system, processes, page cache"),
    step_s=Assumed(2e-3, 5e-4, 5e-3, "logits' sampling and the scheduler, one step after the other"),
    step_row_s=Assumed(2e-6, 0.0, 1e-5, "metadata of a sequence"),
    agree_s=Assumed(3e-4, 1e-4, 1e-3, "a small all-gather between hosts"),
    boundary_s=Assumed(7.5e-3, 5e-3, 10e-3, _TABLE_2),
    partition_s=Assumed(7.5, 5.0, 10.0, _TABLE_2),
    layer_s=Assumed(5e-5, 2e-5, 1e-4, "some 30 kernels with gaps of 1 to 3 microseconds"),
    launch_s=Assumed(6e-4, 3e-4, 1.2e-3, "some 50 launches from Python"),
    expert_s=Assumed(0.0, 0.0, 2e-6, "one kernel computes all experts"),
    exchange_s=Assumed(2e-5, 1e-5, 5e-5, f"12 to 25 microseconds for up to 2 MB on eight GPUs {_TABLES}"),
    memory_share=Assumed(0.78, 0.65, 0.9, f"matrices of few rows reach 0.55 to 0.8 {_TABLES}"),
    copy_share=Assumed(0.86, 0.75, 0.92, "pinned copies of megabytes"),
    exchange_share=Assumed(0.68, 0.5, 0.85, f"0.69 for 134 MB, 0.48 for 17 MB on eight GPUs {_TABLES}"),
    products_share=Assumed(0.9, 0.8, 1.0, f"FP8 in blocks reaches 0.9 of what bfloat16 reaches {_TABLES}"),
    expert_share=Assumed(0.8, 0.65, 0.95, f"DeepGEMM's groups of matrices {_TABLES}"),
    attention_share=Assumed(0.95, 0.8, 1.0, "prompts of usual lengths"),
    corner=Assumed(1.3, 1.0, 2.5, f"1.0 to 1.3 in FP8, 2.6 in bfloat16 {_TABLES}"),
    row_passes=Assumed(10.0, 6.0, 16.0, "norms, rotation, quantisation, residuals"),
    choice_passes=Assumed(4.0, 2.0, 8.0, "gathering rows by expert, activation, quantisation, sums"),
    host_share=Assumed(0.6, 0.4, 0.8, "attention on processors"),
    unevenness=Assumed(0.45, 0.1, 1.0, "trained to be balanced, and uneven for prompts of one kind"),
    overlap=Assumed(0.95, 0.8, 1.0, "copies by streams of their own"),
    exchange=ALL_TO_ALL,
    kv=(DEVICE, INCLUSIVE, STREAMED),
    prefill=(EXPERT_PARALLEL, DATA_PARALLEL),
    attention=(DEVICE, HOST),
    streams_weights=True,
    chunk_tokens=65536,
    dispatch_bytes=1.0,
)

SGLANG = replace(
    BATCHGEN,
    name="sglang",
    title="SGLang 0.5.5",
    reserve_bytes=Assumed(5 * _GIB, 3 * _GIB, 9 * _GIB, "process, workspaces, graphs, a pass; tuned to the limit"),
    ranks_reserve_bytes=Assumed(6 * _GIB, 3 * _GIB, 10 * _GIB, "gathered rows of all ranks, and their choices"),
    step_s=Assumed(8e-4, 2e-4, 2.5e-3, "the scheduler runs behind the device's work"),
    boundary_s=NOTHING,
    partition_s=NOTHING,
    launch_s=Assumed(8e-4, 4e-4, 1.4e-3, "some 60 launches from Python"),
    kv=(DEVICE,),
    prefill=(EXPERT_PARALLEL,),
    attention=(DEVICE,),
    streams_weights=False,
    exchange=GATHER,
    padded_gather=True,
    ragged_gather=2.0,
    chunk_tokens=8192,
    keeps_windows=False,
    graph_rows=512,  # --cuda-graph-max-bs, which it sets so for four ranks or more with 60 GiB or more each
    expert_share=Assumed(0.65, 0.45, 0.85, f"Triton's groups of matrices reach 0.45 to 0.75 {_TABLES}"),
)

# Without --ep-size its ranks have a slice of every expert, which makes thin matrices and needs no balance.
SGLANG_SLICED = replace(
    SGLANG,
    name="sglang-sliced",
    title="SGLang 0.5.5, experts in slices",
    tensor_experts=True,
    expert_share=Assumed(0.5, 0.3, 0.75, "as with whole experts, with products over few columns"),
)

VLLM = replace(
    SGLANG,
    name="vllm",
    title="vLLM 0.11.2",
    step_s=Assumed(1.5e-3, 4e-4, 4e-3, "the scheduler runs partly behind the device's work"),
    ragged_gather=1.0,
    graph_rows=512,
    mixed_graphs=True,
    kernel_tables=("vllm", "trtllm"),
)

# Layer by layer from host memory: they differ in what lies where, and in how much copies hide.
_BY_LAYER = replace(
    BATCHGEN,
    exchange=GATHER,
    data_attention=False,
    tensor_attention=False,
    reserve_bytes=Assumed(3 * _GIB, 1.5 * _GIB, 6 * _GIB, "process, two layers of weights in part, a pass"),
    step_s=Assumed(3e-3, 1e-3, 1e-2, "a step in Python"),
    expert_s=Assumed(6e-5, 2e-5, 1.5e-4, "some launches for each expert"),
    boundary_s=NOTHING,
    partition_s=NOTHING,
    prefill=(EXPERT_PARALLEL,),
    by_layer=True,
    chunk_tokens=16384,
)

FLEXGEN = replace(
    _BY_LAYER,
    name="flexgen",
    title="FlexGen",
    kv=(INCLUSIVE, STREAMED),
    attention=(DEVICE, HOST),
    overlap=Assumed(0.8, 0.5, 1.0, "six streams in lockstep, a block of batches at a time"),
)
MOE_LIGHTNING = replace(
    _BY_LAYER,
    name="moe-lightning",
    title="MoE-Lightning",
    kv=(INCLUSIVE,),
    attention=(HOST,),
    overlap=Assumed(0.92, 0.75, 1.0, "attention of one micro-batch on the host beside the weights of the next"),
)
DEEPSPEED = replace(
    _BY_LAYER,
    name="deepspeed",
    title="DeepSpeed ZeRO-Inference",
    kv=(DEVICE, STREAMED),
    attention=(DEVICE,),
    overlap=Assumed(0.6, 0.3, 0.9, "the next layer is prefetched; kernels are launched from Python"),
)
ENGINES: tuple[EngineSettings, ...] = (BATCHGEN, SGLANG, SGLANG_SLICED, VLLM, FLEXGEN, MOE_LIGHTNING, DEEPSPEED)


def engine_named(name: str) -> EngineSettings:
    """Return an engine by its name, in any case. Raises ConfigError, which lists the names."""
    for engine in ENGINES:
        if engine.name == name.lower():
            return engine
    raise ConfigError(f"there is no engine {name!r} here; it is one of {', '.join(one.name for one in ENGINES)}")
