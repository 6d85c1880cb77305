"""Owns putting our CPU operators under SGLang's layers in this process, and counting what they do."""

from __future__ import annotations

from typing import Any

from sgl_batch.errors import ConfigError
from sgl_batch.layers import cpu_grammar
from sgl_batch.layers.attention.cpu_paged import CpuPagedAttention
from sgl_batch.layers.moe.cpu_experts import combined_experts
from sgl_batch.model_executor.counters import Counters
from sgl_batch.sglang_adapter.layers import (
    StandardCombineInput,
    UnquantizedFusedMoEMethod,
    register_attention_backend,
    register_forward,
)
from sgl_batch.sglang_adapter.names import CPU_ATTENTION, CPU_DISPATCH_KEY


def register(counters: Counters) -> None:
    """Register attention, experts and grammar masks. Call before the model is built."""

    def experts_forward(method: Any, layer: Any, dispatch_output: Any) -> Any:
        config = method.moe_runner_config
        if config.activation != "silu" or config.apply_router_weight_on_input:
            raise ConfigError(
                f"experts on a CPU use SiLU and weight their output; this model asks for activation="
                f"{config.activation!r}, apply_router_weight_on_input={config.apply_router_weight_on_input}"
            )
        weights, ids, _ = dispatch_output.topk_output
        with counters.clock.part("experts"):
            out, rows_per_expert = combined_experts(
                dispatch_output.hidden_states, layer.w13_weight, layer.w2_weight, weights, ids
            )
        counters.add_expert_call(rows_per_expert)
        return StandardCombineInput(hidden_states=out)

    register_attention_backend(CPU_ATTENTION)(CpuPagedAttention)
    register_forward(UnquantizedFusedMoEMethod, experts_forward, CPU_DISPATCH_KEY)
    cpu_grammar.register()
