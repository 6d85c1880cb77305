"""Owns the engines of the stages: their arguments, their references, and the checks of their counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bringup.machine import Machine
from bringup.tokens import NEAR_TIE

_TEST_MODELS = Path(__file__).resolve().parents[2] / "test" / "models"
QWEN, MIXTRAL, DEEPSEEK = "random-qwen3-moe", "random-mixtral", "tiny-deepseek-v3"
# Families with an adapter, besides those of the models above, by their names in tiny_models/random_families.py.
FAMILIES_BESIDE = (
    "qwen2-moe",
    "olmoe",
    "glm4-moe",
    "minimax-m2",
    "deepseek-v2",
    "kimi-k2",
    "gpt-oss",
    "qwen3",
    "qwen2",
    "llama3",
    "mistral",
)
# Numbers of 8 bits: two nearly equal values may be rounded a sixteenth apart. Not measured.
FP8_NEAR_TIE = 0.5

SMALL = {"page_size": 16, "boundary_tokens": 8, "b_moe_prefill": 700, "b_moe_decode": 8, "max_total_tokens": 16384}
WHOLE = {**SMALL, "b_moe_prefill": 2048, "b_moe_decode": 16}
CUT = {**SMALL, "b_attn_prefill": 64, "b_attn_decode": 3}
# Pages for the longest sequence and a few short ones: most wait in the store.
STORE = {**CUT, "max_total_tokens": 48 * 16, "kv_store_bytes": 64 << 20}
# No prefill group while anything runs: all but the first prompts are computed together with decode rows.
MIXED = {**CUT, "mix_prefill": 32, "b_moe_prefill": 64, "ready_ahead": 0.0, "refill_watermark": 0.0}
TWO_RANKS = {"tp_size": 2, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True, "rank_timeout_s": 60.0}
MEASURED = {"decode_forward": "measure", "expert_runner": "auto", "overlap": "auto"}
GRAPHS = {"disable_cuda_graph": False, "cuda_graph_max_bs_decode": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine's stage. `against`: the stage that keeps its reference; None where it keeps one itself.

    `proof`: counters, and what each must exceed (a number, or another counter). `transformers_model`: what transformers
    reads to make the reference on a CPU; None where stock SGLang makes it there, too.
    """

    name: str
    what: str
    against: str | None = "stock"
    model: str = QWEN
    transformers_model: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    proof: dict[str, str | int] = field(default_factory=dict)
    gpu_only: bool = False
    near_tie: float = NEAR_TIE

    @property
    def is_random(self) -> bool:
        return self.model.startswith("random-")

    def spec(self, machine: Machine) -> dict[str, Any]:
        """Return the spec for engine_stage.py."""
        keeps = self.against is None
        for_transformers = None if machine.on_gpu else self.transformers_model
        engine = ("transformers" if for_transformers else "stock") if keeps else "ours"
        models = machine.folder / "models" if self.is_random else _TEST_MODELS
        return {
            "engine": engine,
            "keeps": keeps,
            "model": str(models / (for_transformers or self.model)),
            "dtype": machine.dtype,
            "arguments": {**_device_arguments(machine, engine), **self.arguments},
            "reference": str(machine.folder / f"{self.against or self.name}.reference.json"),
            "near_tie": self.near_tie,
            "proof": self.proof,
        }


def _device_arguments(machine: Machine, engine: str) -> dict[str, Any]:
    """Return the common arguments of both engines; graphs and self-checks are on only in stages about them."""
    if not machine.on_gpu:
        return {"device": "cpu"}
    return {
        **({"decode_forward": "eager", "expert_runner": "sglang", "overlap": "off"} if engine == "ours" else {}),
        "device": "cuda",
        "attention_backend": machine.attention_backend,
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.3,
    }


def engines() -> tuple[Engine, ...]:
    """Return all engines in order; a reference comes before the engines that are compared with it."""
    return (
        _stock("stock", "stock SGLang on a Qwen3-MoE: the reference tokens"),
        Engine(name="plain", what="one group, attention in one piece", arguments=WHOLE, proof={"decode_steps": 0}),
        Engine(
            name="sub-batched",
            what="b_attn < b_moe: attention in sub-batches, experts once",
            arguments=CUT,
            proof={"attention_calls": "expert_calls"},
        ),
        Engine(
            name="store-inclusive",
            what="host KV store that has every page",
            arguments={**STORE, "kv_store_mode": "inclusive", "decode_kv": "resident"},
            proof={"pages_restored": 0},
        ),
        Engine(
            name="store-exclusive",
            what="host KV store that has what the device has not",
            arguments={**STORE, "kv_store_mode": "exclusive", "decode_kv": "resident"},
            proof={"pages_restored": 0},
        ),
        Engine(
            name="store-streamed",
            what="decode KV streamed from the store by layer and sub-batch",
            arguments={**STORE, "kv_store_mode": "inclusive", "decode_kv": "streamed"},
            proof={"streamed_steps": 0},
        ),
        Engine(
            name="streamed-weights",
            what="experts fetched while the model runs",
            arguments={**CUT, "weights": "streamed"},
            proof={"weights_read": 0},
        ),
        Engine(
            name="sglang-graphs",
            what="SGLang's decode graphs, groups of one sub-batch",
            arguments={**WHOLE, **GRAPHS, "decode_forward": "default"},
            proof={"forwards_by_sglang": 0},
            gpu_only=True,
        ),
        Engine(
            name="graphs",
            what="whole decode steps as CUDA graphs of ours, groups of several sub-batches",
            arguments={**CUT, **GRAPHS, "decode_forward": "coroutine", "decode_graph_memory": 1 << 30},
            proof={"graph_replays": 0},
            gpu_only=True,
        ),
        Engine(
            name="self-check",
            what="the start measures decode's forward pass and the expert runner, and settles overlap by that",
            arguments={**CUT, **GRAPHS, **MEASURED, "decode_graph_memory": 1 << 30},
            gpu_only=True,
        ),
        Engine(
            name="self-check-store",
            what="the same beside a host KV store: the rate of copies decides where decode KV lies",
            arguments={**STORE, **GRAPHS, **MEASURED, "kv_store_mode": "inclusive", "decode_kv": "auto"},
            gpu_only=True,
        ),
        Engine(
            name="overlap",
            what="results processed while the next step computes",
            arguments={**WHOLE, "overlap": "on"},
            proof={"decode_steps_overlapped": 0},
        ),
        Engine(
            name="mixed",
            what="prompts in chunks beside decode rows",
            arguments=MIXED,
            proof={"mixed_passes": 0},
        ),
        *(
            Engine(
                name=f"two-ranks-{dispatcher}",
                what=f"two ranks on one device, tokens through {dispatcher}",
                arguments={**CUT, **TWO_RANKS, "token_dispatcher": dispatcher, "migration": "always"},
                proof={"sequences_arrived": 0},
            )
            for dispatcher in ("gloo", "shared")
        ),
        _stock("stock-mixtral", "stock SGLang on a Mixtral: reference tokens", model=MIXTRAL),
        Engine(name="mixtral", what="Mixtral, sub-batched", against="stock-mixtral", model=MIXTRAL, arguments=CUT),
        _stock(
            "stock-mla",
            # Stock SGLang has no latent attention on a CPU.
            "a DeepSeek-V3: reference tokens (on a CPU those of transformers)",
            model=DEEPSEEK,
            transformers_model=DEEPSEEK,
        ),
        Engine(name="mla", what="latent attention, sub-batched", against="stock-mla", model=DEEPSEEK, arguments=CUT),
        *(engine for family in FAMILIES_BESIDE for engine in _family(family)),
        *_rounded("fp8-kv", "KV of 8 bits", {"kv_cache_dtype": "fp8_e4m3"}),
        *_rounded("fp8-weights", "weights of 8 bits", {"quantization": "fp8"}),
    )


def _stock(
    name: str,
    what: str,
    *,
    model: str = QWEN,
    transformers_model: str | None = None,
    gpu_only: bool = False,
    **more: Any,
) -> Engine:
    return Engine(
        name=name,
        what=what,
        against=None,
        model=model,
        transformers_model=transformers_model,
        arguments={"max_total_tokens": 16384, "disable_radix_cache": True, **more},
        gpu_only=gpu_only,
    )


def _family(name: str) -> tuple[Engine, Engine]:
    """Return a family's stage in sub-batches. Stock SGLang and transformers do not read all configs of each other."""
    model = f"random-{name}-hub"
    # Transformers reads a number of DeepSeek-V2's experts that it never sets, so it gives no reference.
    gpu_only = name == "deepseek-v2"
    return (
        _stock(
            f"stock-family-{name}",
            f"{name}: reference tokens" + ("" if gpu_only else " (on a CPU those of transformers)"),
            model=model,
            transformers_model=f"random-{name}-transformers",
            gpu_only=gpu_only,
        ),
        Engine(
            name=f"family-{name}",
            what=f"{name}, sub-batched",
            against=f"stock-family-{name}",
            model=model,
            arguments=CUT,
            proof={"attention_calls": "expert_calls"},
            gpu_only=gpu_only,
        ),
    )


def _rounded(name: str, what: str, more: dict[str, Any]) -> tuple[Engine, Engine]:
    """Return stages whose numbers are rounded in the same way in both engines."""
    return (
        _stock(f"stock-{name}", f"stock SGLang with {what}: reference tokens", gpu_only=True, **more),
        Engine(
            name=name,
            what=f"{what}, sub-batched",
            against=f"stock-{name}",
            arguments={**CUT, **more},
            gpu_only=True,
            near_tie=FP8_NEAR_TIE,
        ),
    )
