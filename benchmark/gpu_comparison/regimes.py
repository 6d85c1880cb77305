"""Owns the regimes: which sizes each has at which scale, and which configurations of both engines take part.

Stock is tuned by a small sweep: its own defaults, and one change to them at a time. Sizes for a GPU are chosen by
arithmetic for one H200; none of this has run on a GPU yet.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from comparison.workload import Workload, random_workload

from gpu_comparison.cases import Case, Regime, Role
from gpu_comparison.shapes import ModelShape, qwen3_30b, tiny
from sgl_batch.byte_sizes import format_bytes
from sgl_batch.errors import ConfigError

GIB = 1 << 30
OURS, STOCK = "sgl_batch", "stock"
DEFAULT_STOCK = "stock, its defaults"
NO_GPU = "not available on a CPU"
_TINY_POOL = 16384  # tokens: on a CPU stock would fill half of the memory with zeros
_OFFLOAD_BESIDE_GIB = 4  # of a device budget, for what is neither weights nor KV


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much a regime does. Lengths in tokens.

    `pool_tokens`: of KV, all that the device may hold, where the regime sets that. `budget_bytes`: of device memory,
    where it sets that. `store_bytes`: of our host KV store, and about what stock's hierarchical cache gets.
    """

    layers: int
    num_prompts: int
    input_len: int
    output_len: int
    pool_tokens: int = 0
    budget_bytes: int = 0
    store_bytes: int = 0

    @property
    def need_tokens(self) -> int:
        return self.num_prompts * (self.input_len + self.output_len)


# 131,072 tokens are 12 GiB of KV in 48 layers; 640 sequences of 2,048 need ten times that.
FULL = {
    "kv": Sizes(layers=48, num_prompts=640, input_len=1024, output_len=1024, pool_tokens=131072, store_bytes=64 * GIB),
    "tight": Sizes(layers=96, num_prompts=256, input_len=512, output_len=512, store_bytes=48 * GIB),
    "weights": Sizes(layers=32, num_prompts=512, input_len=128, output_len=64, budget_bytes=24 * GIB),
    "prefill": Sizes(layers=48, num_prompts=64, input_len=8192, output_len=1024),
    "accumulation": Sizes(layers=48, num_prompts=1024, input_len=128, output_len=128),
}
TINY = {
    "kv": Sizes(layers=2, num_prompts=40, input_len=16, output_len=48, pool_tokens=256, store_bytes=8 << 20),
    "tight": Sizes(layers=4, num_prompts=32, input_len=32, output_len=32, pool_tokens=512, store_bytes=8 << 20),
    "weights": Sizes(layers=4, num_prompts=32, input_len=16, output_len=16, budget_bytes=2 << 20),
    "prefill": Sizes(layers=2, num_prompts=8, input_len=512, output_len=16),
    "accumulation": Sizes(layers=2, num_prompts=64, input_len=16, output_len=16),
}
SCALES = {"full": FULL, "tiny": TINY}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a regime runs. `backend`: of attention, the same in both engines on a GPU; on a CPU each has its own."""

    on_gpu: bool
    tiny: bool
    backend: str
    gpu_bytes: int
    extra: dict[str, dict[str, Any]]

    def arguments(self, engine: str, more: dict[str, Any]) -> dict[str, Any]:
        """A constructor's arguments: what all cases have, then the case's own, then the user's."""
        device = {"device": "cuda", "attention_backend": self.backend} if self.on_gpu else {"device": "cpu"}
        page = {"page_size": 16, "boundary_tokens": 16} if self.tiny and engine == OURS else {}
        # What was retracted stands in stock's log alone.
        log = {"log_level": "info" if engine == STOCK else "warning"}
        model: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
        if self.tiny:
            model["max_total_tokens"] = _TINY_POOL
        return {**model, **device, **page, **log, **more, **self.extra[engine]}

    def ours(self, name: str, **more: Any) -> Case:
        return Case(name=f"sgl_batch, {name}", role=Role.OURS, engine=OURS, arguments=self.arguments(OURS, more))

    def stock(self, name: str, *, role: Role = Role.PEER, gpu_only: bool = False, **more: Any) -> Case:
        return Case(
            name=name if name.startswith(STOCK) else f"stock, {name}",
            role=role,
            engine=STOCK,
            arguments=self.arguments(STOCK, more),
            lacking=NO_GPU if gpu_only and not self.on_gpu else None,
        )


def build(name: str, place: Place, options: argparse.Namespace) -> Regime:
    """The regime `name`, with the sizes that the flags ask for. Raises ConfigError."""
    sizes = SCALES["tiny" if place.tiny else "full"][name]
    given = {field: getattr(options, field) for field in ("layers", "num_prompts", "input_len", "output_len")}
    for field, value in given.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{field.replace('_', '-')} is {value}; it must be at least 1")
    sizes = replace(sizes, **{field: value for field, value in given.items() if value is not None})
    shape = tiny(sizes.layers) if place.tiny else qwen3_30b(sizes.layers)
    workload = random_workload(
        num_prompts=sizes.num_prompts,
        input_len=sizes.input_len,
        spread=sizes.input_len // 4 if name in ("kv", "tight") else 0,
        output_len=sizes.output_len,
        vocabulary=shape.vocabulary,
        seed=0,
    )
    longest = max(map(len, workload.prompts)) + sizes.output_len
    most = min(shape.context, sizes.pool_tokens or shape.context)
    if longest > most:
        raise ConfigError(
            f"the longest sequence has {longest} tokens, and {name} has room for {most}: lower --input-len or "
            "--output-len"
        )
    regime = REGIMES[name](sizes, shape, workload, place)
    return replace(regime, cases=_chosen(regime, options.peers))


def _chosen(regime: Regime, wanted: list[str] | None) -> tuple[Case, ...]:
    """All cases, but of the peers those alone whose names have one of the words in them."""
    if wanted is None:
        return regime.cases
    for word in wanted:
        if not any(word in case.name for case in regime.of_role(Role.PEER)):
            known = "; ".join(case.name for case in regime.of_role(Role.PEER))
            raise ConfigError(f"--peers names {word!r}, which is in no peer's name of {regime.name}: {known}")
    return tuple(
        case for case in regime.cases if case.role is not Role.PEER or any(word in case.name for word in wanted)
    )


def _hierarchical(store_bytes: int, pool_bytes: int) -> dict[str, Any]:
    """Stock's cache in host memory, as large as our store."""
    return {"enable_hierarchical_cache": True, "hicache_ratio": max(1.1, round(store_bytes / pool_bytes, 1))}


def _kv(sizes: Sizes, shape: ModelShape, workload: Workload, place: Place) -> Regime:
    pool: dict[str, Any] = {"max_total_tokens": sizes.pool_tokens}
    pool_bytes = sizes.pool_tokens * shape.kv_token_bytes
    chunk = 512 if place.tiny else 16384
    return Regime(
        name="kv",
        title=f"KV on the device: {sizes.pool_tokens:,} tokens ({format_bytes(pool_bytes)}); all sequences need "
        f"{sizes.need_tokens / sizes.pool_tokens:.1f} times that",
        shape=shape,
        workload=workload,
        cases=(
            place.ours("host KV store", **pool, kv_store_bytes=sizes.store_bytes),
            place.ours("no store", **pool),
            place.stock(DEFAULT_STOCK, **pool),
            place.stock("hierarchical cache", gpu_only=True, **pool, **_hierarchical(sizes.store_bytes, pool_bytes)),
            place.stock("half as conservative", **pool, schedule_conservativeness=0.5),
            place.stock(f"chunks of {chunk}", **pool, chunked_prefill_size=chunk, max_prefill_tokens=chunk),
        ),
        bar=1.3,
        notes=("The pool is fixed for all, so that mem_fraction_static decides nothing.",),
    )


def _tight(sizes: Sizes, shape: ModelShape, workload: Workload, place: Place) -> Regime:
    """On a GPU weights leave little for KV; on a CPU, where weights are tiny, the pool is said."""
    pool: dict[str, Any] = {} if place.on_gpu else {"max_total_tokens": sizes.pool_tokens}

    def memory(fraction: float) -> dict[str, Any]:
        return {**pool, "mem_fraction_static": fraction if place.on_gpu else 0.5}

    left = max(int(0.9 * place.gpu_bytes) - shape.weight_bytes, GIB)
    return Regime(
        name="tight",
        title=f"{shape.weight_bytes / 1e9:.0f} GB of weights on a device of {place.gpu_bytes / 1e9:.0f} GB"
        if place.on_gpu
        else f"KV on the device: {sizes.pool_tokens:,} tokens, said and not left by the weights",
        shape=shape,
        workload=workload,
        cases=(
            place.ours("host KV store", **memory(0.92), kv_store_bytes=sizes.store_bytes),
            place.ours("no store", **memory(0.92)),
            place.stock(DEFAULT_STOCK, **pool),
            place.stock("mem_fraction_static 0.92", **memory(0.92)),
            place.stock("0.95, graphs to 64", gpu_only=True, **memory(0.95), cuda_graph_max_bs_decode=64),
            place.stock("0.92, chunks of 4096", **memory(0.92), chunked_prefill_size=4096),
            place.stock(
                "0.92, hierarchical cache", gpu_only=True, **memory(0.92), **_hierarchical(sizes.store_bytes, left)
            ),
        ),
        bar=1.5,
    )


def _weights(sizes: Sizes, shape: ModelShape, workload: Workload, place: Place) -> Regime:
    """A device for fewer bytes than the weights: on a GPU by mem_fraction_static, on a CPU by the slots for experts."""
    kv_tokens = -(-sizes.need_tokens // 1024) * 1024 + 64 * sizes.num_prompts
    kv_bytes = kv_tokens * shape.kv_token_bytes
    others = shape.weight_bytes - shape.all_expert_bytes
    beside = _OFFLOAD_BESIDE_GIB * GIB if place.on_gpu else 0
    experts = sizes.budget_bytes - others - kv_bytes - beside
    if place.on_gpu and experts < 2 * shape.experts * shape.expert_bytes:
        raise ConfigError(
            f"a device budget of {sizes.budget_bytes / GIB:.0f} GiB leaves {experts / GIB:.1f} GiB for experts beside "
            f"{kv_bytes / GIB:.1f} GiB of KV, less than two layers' ({2 * shape.experts * shape.expert_bytes / GIB:.1f}"
            " GiB): lower --num-prompts, --input-len or --output-len"
        )
    slots = experts if place.on_gpu else 2 * shape.experts * shape.expert_bytes
    fraction: dict[str, Any] = (
        {"mem_fraction_static": round(sizes.budget_bytes / place.gpu_bytes, 3)} if place.on_gpu else {}
    )
    shared: dict[str, Any] = {"load_format": "auto", "max_total_tokens": kv_tokens}
    budget = {**shared, **fraction}
    # Stock keeps on the device what is left beside the same KV.
    offload = max(1, -(-(shape.weight_bytes + kv_bytes + beside - sizes.budget_bytes) // GIB))
    running: dict[str, Any] = {"max_running_requests": sizes.num_prompts}
    group: dict[str, Any] = {"b_moe_decode": sizes.num_prompts, "b_attn_decode": min(256, sizes.num_prompts)}
    return Regime(
        name="weights",
        title=f"{format_bytes(shape.weight_bytes)} of weights, a device budget of {format_bytes(sizes.budget_bytes)}",
        shape=shape,
        workload=workload,
        cases=(
            place.ours("experts streamed", **budget, **group, weights="streamed", weight_memory=slots),
            place.stock(f"cpu_offload_gb {offload}", gpu_only=True, **budget, **running, cpu_offload_gb=offload),
            place.stock(
                f"cpu_offload_gb {offload}, no graphs",
                gpu_only=True,
                **budget,
                **running,
                cpu_offload_gb=offload,
                disable_cuda_graph=True,
            ),
            place.stock(
                "layer groups offloaded",
                gpu_only=True,
                **budget,
                **running,
                offload_group_size=2,
                offload_num_in_group=1,
                offload_prefetch_step=1,
                offload_mode="cpu",
            ),
            place.stock("all weights on the device, no budget", role=Role.REFERENCE, **shared, **running),
        ),
        bar=3.0,
        bound_bar=0.7,
        checkpoint=True,
        notes=("Both engines load the same checkpoint, as streamed experts are read from files.",),
    )


def _prefill(sizes: Sizes, shape: ModelShape, workload: Workload, place: Place) -> Regime:
    chunks = (256, 1024) if place.tiny else (16384, 32768)
    rows: dict[str, Any] = {"b_moe_prefill": 2048, "b_attn_prefill": 512} if place.tiny else {"b_moe_prefill": 32768}
    attention: dict[str, Any] = {} if place.tiny else {"b_attn_prefill": 8192}
    memory: dict[str, Any] = {"mem_fraction_static": 0.88} if place.on_gpu else {}
    return Regime(
        name="prefill",
        title=f"prompts of {sizes.input_len:,} tokens, {sizes.output_len:,} generated",
        shape=shape,
        workload=workload,
        cases=(
            place.ours("defaults and larger prefill groups", **memory, **rows, **attention),
            place.stock(DEFAULT_STOCK),
            *(
                place.stock(f"chunks of {chunk}", **memory, chunked_prefill_size=chunk, max_prefill_tokens=chunk)
                for chunk in chunks
            ),
        ),
        bar=1.1,
    )


def _accumulation(sizes: Sizes, shape: ModelShape, workload: Workload, place: Place) -> Regime:
    """The same kernels without graphs, which only groups of one sub-batch could have: what is left is the design."""
    small = max(1, sizes.num_prompts // 8)
    prefill: dict[str, Any] = {"b_attn_prefill": 256, "b_moe_prefill": 1024} if place.tiny else {"b_moe_prefill": 16384}
    plan: dict[str, Any] = {
        **prefill,
        "b_attn_decode": small,
        "b_moe_decode": sizes.num_prompts,
        "disable_cuda_graph": True,
    }
    one: dict[str, Any] = {
        "b_attn_prefill": prefill.get("b_attn_prefill", 2048),
        "b_moe_prefill": prefill.get("b_attn_prefill", 2048),
        "b_attn_decode": small,
        "b_moe_decode": small,
        "disable_cuda_graph": True,
    }
    shut = replace(place.ours("accumulation off", **plan, accumulate=False), role=Role.PEER)
    equal = replace(place.ours(f"b_moe = b_attn = {small}", **one), role=Role.PEER)
    graphs = {**one, "disable_cuda_graph": False}
    with_graphs = replace(place.ours(f"b_moe = b_attn = {small}, CUDA graphs", **graphs), role=Role.PEER)
    return Regime(
        name="accumulation",
        title=f"groups of {sizes.num_prompts} sequences, attention by {small}: one expert call for the group, or not",
        shape=shape,
        workload=workload,
        cases=(
            place.ours(f"the plan: b_attn {small}, b_moe {sizes.num_prompts}", **plan),
            shut,
            equal,
            with_graphs if place.on_gpu else replace(with_graphs, lacking=NO_GPU),
        ),
        bar=None,
        notes=("All are sgl_batch: the peers lack accumulation and nothing else.",),
    )


REGIMES: dict[str, Callable[[Sizes, ModelShape, Workload, Place], Regime]] = {
    "kv": _kv,
    "tight": _tight,
    "weights": _weights,
    "prefill": _prefill,
    "accumulation": _accumulation,
}
