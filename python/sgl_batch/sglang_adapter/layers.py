"""Adapts SGLang's layer classes and registries for our layers room.

It exports the base classes of attention backends, samplers and grammars, and replaces how the modules of a loaded model
compute: linear layers, norms, the output projection, experts. SGLang has no kernels for most of these on a CPU, and its
torch operators give a row other bits if the number of rows changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.types.models import DenseMlp, ExpertLayer

with bootstrap.importing():
    import sglang.srt.layers.rotary_embedding.factory as rotary_factory
    from sglang.srt.constrained.base_grammar_backend import register_grammar_backend
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar, XGrammarGrammarBackend
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.communicator import get_attn_tp_context
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput, StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput, TopK
    from sglang.srt.layers.quantization.unquant import (
        UnquantizedEmbeddingMethod,
        UnquantizedFusedMoEMethod,
        UnquantizedLinearMethod,
    )
    from sglang.srt.layers.rotary_embedding import RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding
    from sglang.srt.layers.rotary_embedding.rope_variant import (
        DeepseekScalingRotaryEmbedding,
        DynamicNTKAlphaRotaryEmbedding,
        DynamicNTKScalingRotaryEmbedding,
        Llama3RotaryEmbedding,
    )
    from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding
    from sglang.srt.layers.sampler import SGLANG_RETURN_ORIGINAL_LOGPROB as RETURN_ORIGINAL_LOGPROB
    from sglang.srt.layers.sampler import Sampler, register_sampler_backend
    from sglang.srt.layers.utils.multi_platform import MultiPlatformOp
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from sglang.srt.sampling import sampling_batch_info
    from sglang.srt.sampling.penaltylib import repetition_penalty
    from sglang.srt.sampling.sampling_params import TOP_K_ALL
    from sglang.srt.utils import BumpAllocator
    from xgrammar import apply_token_bitmask_inplace

__all__ = [
    "PLAIN_ROTARY",
    "RETURN_ORIGINAL_LOGPROB",
    "TOP_K_ALL",
    "AttentionBackend",
    "DeepseekScalingRotaryEmbedding",
    "ParallelLMHead",
    "RMSNorm",
    "Sampler",
    "StandardCombineInput",
    "StandardTopKOutput",
    "TopK",
    "UnquantizedEmbeddingMethod",
    "UnquantizedFusedMoEMethod",
    "VocabParallelEmbedding",
    "XGrammarGrammar",
    "XGrammarGrammarBackend",
    "allow_plain_positions",
    "apply_token_bitmask_inplace",
    "clear_attention_inputs",
    "expert_layers",
    "is_plain_norm",
    "plain_mlps",
    "register_attention_backend",
    "register_forward",
    "register_grammar_backend",
    "register_sampler_backend",
    "replace_experts",
    "replace_forward",
    "replace_forwards",
    "replace_linear",
    "replace_lm_head",
    "replace_qk_norm_rope",
    "replace_repetition_penalties",
    "scratch_allocator",
    "sglang_experts_of",
]


def replace_linear(model: torch.nn.Module, linear: Callable[..., Any], *, unless: Callable[[Any], bool]) -> list[Any]:
    """Let every unquantised linear layer of a loaded model compute with `linear(x, weight, bias)`; return these layers.

    Layers whose weight `unless` accepts stay as they are.
    """

    class LinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
        def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
            return linear(x, layer.weight, bias)

    changed = [m for m in plain_linears(model).values() if not unless(m.weight)]
    for module in changed:
        module.quant_method = LinearMethod()
    return changed


def plain_linears(model: torch.nn.Module) -> dict[str, Any]:
    """Return the linear layers of a loaded model that are not quantised, by name."""
    modules = model.named_modules()
    return {name: m for name, m in modules if type(getattr(m, "quant_method", None)) is UnquantizedLinearMethod}


def plain_mlps(model: torch.nn.Module, names: Iterable[str]) -> list[DenseMlp]:
    """Return the MLPs of a loaded model, by class name, whose layers are neither quantised nor have a bias."""
    modules: Iterable[Any] = model.modules()
    found = [m for m in modules if type(m).__name__ in names]
    return [m for m in found if all(_is_plain_linear(layer) for layer in (m.gate_up_proj, m.down_proj))]


def _is_plain_linear(layer: Any) -> bool:
    return type(layer.quant_method) is UnquantizedLinearMethod and layer.bias is None


def replace_forwards(model: torch.nn.Module, forwards: Mapping[str, Callable[..., Any]]) -> dict[str, list[Any]]:
    """Let the modules of a loaded model whose class has one of these names compute with `forward(module, ...)`.

    Returns the modules by class name.
    """
    found: dict[str, list[Any]] = {name: [] for name in forwards}
    for module in model.modules():
        name = type(module).__name__
        if name in forwards:
            module.forward = partial(forwards[name], module)
            found[name].append(module)
    return found


def replace_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> None:
    """Let one module of a loaded model compute with `forward(...)`."""
    module.forward = forward


PLAIN_ROTARY = (
    RotaryEmbedding,
    LinearScalingRotaryEmbedding,
    DynamicNTKAlphaRotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)
"""Rotations that differ in their table of angles alone."""
# SGLang's classes of attention that norms and rotates in a method with the product before.
_DENSE_QWEN3, _GLM4_MOE = "Qwen3Attention", "Glm4MoeAttention"


def replace_qk_norm_rope(model: torch.nn.Module, compute: Callable[..., None]) -> int:
    """Let attention that norms each head of queries and keys norm and rotate with `compute`; return how many modules.

    `compute(attention, qkv, positions)` writes to qkv [T, q | k | v]. Modules with other norms or positions stay.
    """

    def under(attention: Any) -> None:
        def normed(qkv: Any, positions: Any) -> Any:
            compute(attention, qkv, positions)
            return qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)

        def prepare_qwen3(positions: Any, hidden_states: Any) -> Any:
            return normed(attention.qkv_proj(hidden_states)[0], positions)

        def prepare_glm4(positions: Any, hidden_states: Any, forward_batch: Any) -> Any:
            if not len(hidden_states):
                return hidden_states, forward_batch, None
            qkv, _ = attention.qkv_proj(hidden_states)
            return None, forward_batch, (*normed(qkv, positions), forward_batch)

        name = type(attention).__name__
        if name == _DENSE_QWEN3:
            attention.forward_prepare_native = prepare_qwen3
        elif name == _GLM4_MOE:
            attention.forward_prepare = prepare_glm4
        else:
            attention.apply_qk_norm_rope = lambda qkv, positions, _: normed(qkv, positions)
            attention._used_fused_qk_norm_rope_last_call = False

    modules: Iterable[Any] = model.modules()
    known = [m for m in modules if hasattr(m, "apply_qk_norm_rope") or type(m).__name__ in (_DENSE_QWEN3, _GLM4_MOE)]
    found = [m for m in known if hasattr(m, "q_norm") and _norms_and_rotates_plainly(m)]
    for attention in found:
        under(attention)
    return len(found)


def _norms_and_rotates_plainly(attention: Any) -> bool:
    norms = (attention.q_norm, attention.k_norm)
    return (
        all(type(norm) is RMSNorm and is_plain_norm(norm) for norm in norms)
        and type(attention.rotary_emb) in PLAIN_ROTARY
        and norms[0].variance_epsilon == norms[1].variance_epsilon
    )


def is_plain_norm(norm: Any) -> bool:
    """Return whether a norm is over whole rows, with one rounding at its end."""
    return (
        norm.variance_size_override is None
        and norm.override_orig_dtype in (None, norm.weight.dtype)
        and not norm.cast_x_before_out_mul
        and not norm.fp32_residual
    )


def allow_plain_positions() -> None:
    """Let SGLang build latent attention without rope scaling on a CPU, where it supports scaled positions only."""
    own = rotary_factory.get_rope_cpu

    def get_rope_cpu(
        head_size: int,
        rotary_dim: int,
        max_position: int,
        base: int,
        is_neox_style: bool = True,
        rope_scaling: Any = None,
        *rest: Any,
    ) -> Any:
        sizes = (head_size, rotary_dim, max_position, base, is_neox_style)
        if rope_scaling is None:
            return rotary_factory.get_rope(*sizes)
        return own(*sizes, rope_scaling, *rest)

    rotary_factory.get_rope_cpu = get_rope_cpu


def replace_repetition_penalties(apply: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Let `apply(logits, penalties)` change logits in place, where both are contiguous float32 of the same sizes."""
    own = repetition_penalty.apply_scaling_penalties

    def apply_scaling_penalties(logits: torch.Tensor, scaling_penalties: torch.Tensor) -> None:
        both = (logits, scaling_penalties)
        fits = logits.shape == scaling_penalties.shape and all(
            one.dtype == torch.float32 and one.is_contiguous() for one in both
        )
        (apply if fits else own)(*both)

    repetition_penalty.apply_scaling_penalties = apply_scaling_penalties
    sampling_batch_info.apply_scaling_penalties = apply_scaling_penalties


def scratch_allocator(device: Any) -> Any:
    """Return the allocator that SGLang's latent attention wants for single float32 numbers, to scale fp8 weights."""
    return BumpAllocator(buffer_size=2, dtype=torch.float32, device=device)


def clear_attention_inputs() -> None:
    """Drop the inputs that the layer communicator keeps for latent attention, after attention has read them."""
    get_attn_tp_context().clear_attn_inputs()


def replace_lm_head(model: Any, linear: Callable[..., Any], rows: Callable[..., Any]) -> Any | None:
    """Let the output projection of a loaded model compute with `linear(x, weight, bias)`; return it.

    If it shares its weight with the embedding, `rows(ids, weight)` looks tokens up. None if it stays SGLang's: it is
    quantised, shares its weight with another layer, or is multiplied in float32.
    """

    # SGLang calls a method for the product unless the method has the class of unquantised embeddings.
    class LmHeadMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]
        def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
            return linear(x.to(layer.weight.dtype), layer.weight, bias)

        def embedding(self, layer: Any, input_: Any) -> Any:
            return rows(input_, layer.weight)

    head = getattr(model, "lm_head", None)
    if not isinstance(head, VocabParallelEmbedding) or model.logits_processor.use_fp32_lm_head:
        return None
    address = head.weight.data_ptr()
    holders = [m for m in model.modules() if any(w.data_ptr() == address for w in m.parameters(recurse=False))]
    if any(type(getattr(m, "quant_method", None)) is not UnquantizedEmbeddingMethod for m in holders):
        return None
    for module in holders:
        module.quant_method = LmHeadMethod()
    return head


def expert_layers(model: torch.nn.Module) -> list[ExpertLayer]:
    """Return the layers of a loaded model that hold unquantised experts (`w13_weight`, `w2_weight`)."""
    return [layer for _, layer in named_expert_layers(model)]


def named_expert_layers(model: torch.nn.Module) -> list[tuple[str, ExpertLayer]]:
    """Return the layers of `expert_layers`, each with its name in the model."""
    modules: Iterable[tuple[str, Any]] = model.named_modules()
    return [(n, m) for n, m in modules if type(getattr(m, "quant_method", None)) is UnquantizedFusedMoEMethod]


def replace_experts(layers: list[ExpertLayer], experts: Callable[..., torch.Tensor | None]) -> None:
    """Let layers compute with `experts(layer, x, topk_weights, topk_ids)`, or as before if it returns None."""
    for layer in layers:
        layer.quant_method.apply = _apply_with(experts, layer.quant_method.apply)


def _apply_with(experts: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    def apply(layer: Any, dispatch_output: Any) -> Any:
        weights, ids, _ = dispatch_output.topk_output
        out = experts(layer, dispatch_output.hidden_states, weights, ids)
        return own(layer, dispatch_output) if out is None else StandardCombineInput(hidden_states=out)

    return apply


def sglang_experts_of(
    layer: ExpertLayer,
    x_RM: torch.Tensor,
    topk_weights_RK: torch.Tensor,
    topk_ids_RK: torch.Tensor,
    *,
    f32_output: bool = False,
) -> torch.Tensor:
    """Compute a layer's experts with SGLang's own runner: an `ExpertCall` (layers/moe/expert_runner).

    The output may lie where `x_RM` did. It is summed in x's number type, whatever that of the output.
    """
    topk = StandardTopKOutput(topk_weights=topk_weights_RK, topk_ids=topk_ids_RK, router_logits=None)
    given = StandardDispatchOutput(hidden_states=x_RM.contiguous(), hidden_states_scale=None, topk_output=topk)
    out_RM = layer.run_moe_core(given).hidden_states
    return out_RM.float() if f32_output else out_RM


def register_forward(op_class: Any, forward: Callable[..., Any], dispatch_key: str) -> None:
    """Let SGLang's layer `op_class` compute with `forward` on the platform of this dispatch key."""
    MultiPlatformOp.register_oot_forward(op_class, forward, dispatch_key)
