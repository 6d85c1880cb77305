"""SGLang's layer classes and registries, as our layers room builds on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_batch.sglang_adapter import bootstrap

with bootstrap.importing():
    from sglang.srt.constrained.base_grammar_backend import register_grammar_backend
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar, XGrammarGrammarBackend
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput, StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput, TopK
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
    from sglang.srt.layers.rotary_embedding import RotaryEmbedding
    from sglang.srt.layers.sampler import Sampler, register_sampler_backend
    from sglang.srt.layers.utils.multi_platform import MultiPlatformOp
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

__all__ = [
    "TOP_K_ALL",
    "AttentionBackend",
    "RMSNorm",
    "RotaryEmbedding",
    "Sampler",
    "StandardCombineInput",
    "TopK",
    "UnquantizedFusedMoEMethod",
    "XGrammarGrammar",
    "XGrammarGrammarBackend",
    "expert_layers",
    "put_linear_under",
    "register_attention_backend",
    "register_forward",
    "register_grammar_backend",
    "register_sampler_backend",
    "sglang_expert_sums",
]


def put_linear_under(model: Any, linear: Callable[..., Any]) -> list[Any]:
    """Let every unquantised linear layer of a loaded model compute with `linear(x, weight, bias)`; which those are."""

    class LinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
        def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
            return linear(x, layer.weight, bias)

    changed = [m for m in model.modules() if type(getattr(m, "quant_method", None)) is UnquantizedLinearMethod]
    for module in changed:
        module.quant_method = LinearMethod()
    return changed


def expert_layers(model: Any) -> list[Any]:
    """The layers of a loaded model that hold unquantised experts (`w13_weight`, `w2_weight`)."""
    return [m for m in model.modules() if type(getattr(m, "quant_method", None)) is UnquantizedFusedMoEMethod]


def sglang_expert_sums(experts: Any, x_RM: Any, topk_weights_RK: Any, topk_ids_RK: Any) -> Any:
    """What the experts of a layer on this rank add to each row by SGLang's own expert runner, in float32 [R, M].

    Ids are local, -1 is none. For GPUs; not yet run.
    """
    topk = StandardTopKOutput(topk_weights=topk_weights_RK, topk_ids=topk_ids_RK, router_logits=None)
    given = StandardDispatchOutput(hidden_states=x_RM.contiguous(), hidden_states_scale=None, topk_output=topk)
    return experts.run_moe_core(given).hidden_states.float()


def register_forward(op_class: Any, forward: Callable[..., Any], dispatch_key: str) -> None:
    """Put `forward` under SGLang's layer `op_class` on the platform whose dispatch key is given."""
    MultiPlatformOp.register_oot_forward(op_class, forward, dispatch_key)
