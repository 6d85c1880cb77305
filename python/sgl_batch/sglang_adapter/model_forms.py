"""Adapts models that SGLang builds differently from what their checkpoints ask for.

Each correction is made between the construction and the loading of a model, and says what SGLang does. Models that
SGLang builds as Hugging Face does stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from sgl_batch.errors import ConfigError
from sgl_batch.sglang_adapter import bootstrap

with bootstrap.importing():
    import sglang.srt.model_loader.loader as loader_module
    import torch
    import torch.nn.functional as F
    from sglang.srt.layers.layernorm import RMSNorm

__all__ = ["models_as_configured"]


@contextmanager
def models_as_configured() -> Iterator[None]:
    """Inside, SGLang's loader builds models with the parameters and options of the checkpoint's config.

    They are corrected between construction and loading. The loader raises ConfigError for an option that SGLang does
    not compute.
    """
    own = loader_module._initialize_model

    def initialize(model_config: Any, *args: Any, **kwargs: Any) -> Any:
        config = model_config.hf_config
        for name in config.architectures or ():
            complete = _CONFIGS.get(name)
            if complete is not None:
                complete(config)
        model = own(model_config, *args, **kwargs)
        adapt = _MODELS.get(type(model).__name__)
        if adapt is not None:
            adapt(model, config)
        return model

    loader_module._initialize_model = initialize
    try:
        yield
    finally:
        loader_module._initialize_model = own


def _complete_minimax(config: Any) -> None:
    """Add the options that transformers' config of MiniMax-M2 omits; the model's own config has them."""
    rope = getattr(config, "rope_parameters", None) or {}
    known = {
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "rotary_dim": int(config.head_dim * rope.get("partial_rotary_factor", 1.0)),
    }
    _complete(config, known)


def _complete_deepseek_v2(config: Any) -> None:
    """Add omitted options as _complete_deepseek_v3; a model without groups has one group."""
    _complete(config, {"moe_layer_freq": 1, "scoring_func": "softmax", "n_group": 1, "topk_group": 1})


def _complete_deepseek_v3(config: Any) -> None:
    """Add the options that transformers' config omits; the model's own config has them. It is also Kimi-K2's form."""
    _complete(config, {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"})


def _complete(config: Any, known: Mapping[str, object]) -> None:
    for name, value in known.items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)


def _check_olmoe(config: Any) -> None:
    if config.clip_qkv is not None:
        raise ConfigError(
            f"clip_qkv is {config.clip_qkv} in the model's config, and SGLang's OLMoE does not clip queries, keys and "
            "values: its answers would be wrong"
        )


def _adapt_minimax(model: Any, _: Any) -> None:
    """On a CPU, norm queries and keys over all heads with SGLang's plain norm; MiniMax-M2's own is a GPU kernel."""
    for layer in model.model.layers:
        attention = layer.self_attn
        norms = attention.q_norm, attention.k_norm
        if norms[0].weight.device.type == "cpu":
            attention.q_norm, attention.k_norm = (
                RMSNorm(norm.weight.numel(), eps=norm.variance_epsilon) for norm in norms
            )
            attention.qk_norm_impl = _BothNorms(attention)


class _BothNorms:
    """The object that SGLang's attention of MiniMax-M2 calls to norm queries and keys."""

    def __init__(self, attention: Any) -> None:
        self._attention = attention

    def forward(self, queries: Any, keys: Any) -> tuple[Any, Any]:
        return self._attention.q_norm(queries), self._attention.k_norm(keys)


def _adapt_olmoe(model: Any, config: Any) -> None:
    """Use the config's epsilon in norms, the keys' width in the key norm, and the config's normalisation of choices.

    SGLang's class uses fixed ones. It also lacks start_layer and end_layer, which other models have.
    """
    model.model.start_layer, model.model.end_layer = 0, len(model.model.layers)
    for layer in model.model.layers:
        attention, moe = layer.self_attn, layer.mlp
        attention.k_norm = RMSNorm(attention.kv_size)
        moe.topk.topk_config.renormalize = config.norm_topk_prob
        moe.experts.top_k = config.num_experts_per_tok
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.variance_epsilon = config.rms_norm_eps


def _compute_as_asked(config: Any) -> None:
    """Use the loaded number type in attention and routers; SGLang uses the one in the config."""
    config.dtype = torch.get_default_dtype()


def _adapt_gpt_oss(model: Any, _: Any) -> None:
    """Load this rank's experts of the tensor that has all experts of a layer; SGLang would load all of them.

    On a CPU, keep sinks in float32; SGLang has them in bfloat16, whatever number type the model computes in. Load
    tensor by tensor; SGLang would first collect all of them.
    """
    model.load_weights = partial(_load_one_by_one, model.load_weights)
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for parameter in experts.parameters():
            parameter.weight_loader = partial(_load_own_share, experts, parameter.weight_loader)
        sinks = layer.self_attn.sinks
        if sinks.device.type == "cpu":
            layer.self_attn.sinks = torch.nn.Parameter(sinks.data.float(), requires_grad=False)


def _load_one_by_one(load: Callable[..., None], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    for one in weights:
        load([one])


def _load_own_share(
    experts: Any, load: Callable[..., None], parameter: Any, loaded: torch.Tensor, *args: Any, **kwargs: Any
) -> None:
    first = experts.moe_ep_rank * experts.num_local_experts
    load(parameter, loaded[first : first + experts.num_local_experts], *args, **kwargs)


def _adapt_qwen_moe(model: Any, config: Any) -> None:
    """Build dense layers as the config says; SGLang's Qwen-MoE has experts in every layer."""
    from sglang.srt.models.qwen2_moe import Qwen2MoeMLP

    class DenseMlp(Qwen2MoeMLP):  # type: ignore[misc]
        """SGLang's MLP, with the call of a block of experts."""

        def forward(self, hidden: Any, forward_batch: Any = None) -> Any:
            return super().forward(hidden)

    for number, layer in enumerate(model.model.layers):
        if number in config.mlp_only_layers or (number + 1) % config.decoder_sparse_step:
            layer.mlp = DenseMlp(
                config.hidden_size,
                config.intermediate_size,
                config.hidden_act,
                quant_config=model.quant_config,
                prefix=f"model.layers.{number}.mlp",
            )


def _adapt_glm(model: Any, _: Any) -> None:
    """Let routers read their weights at each call; SGLang's keep the first weights, whatever is loaded later."""
    for layer in model.model.layers:
        gate = getattr(layer.mlp, "gate", None)
        if gate is not None:
            gate.forward = partial(_float32_logits, gate)


def _float32_logits(gate: Any, hidden: torch.Tensor) -> torch.Tensor:
    return F.linear(hidden.to(torch.float32), gate.weight.to(torch.float32))


_CONFIGS: Mapping[str, Callable[[Any], None]] = {
    "DeepseekV2ForCausalLM": _complete_deepseek_v2,
    "DeepseekV3ForCausalLM": _complete_deepseek_v3,
    "GptOssForCausalLM": _compute_as_asked,
    "MiniMaxM2ForCausalLM": _complete_minimax,
    "OlmoeForCausalLM": _check_olmoe,
}
_MODELS: Mapping[str, Callable[[Any, Any], None]] = {
    "Glm4MoeForCausalLM": _adapt_glm,
    "GptOssForCausalLM": _adapt_gpt_oss,
    "MiniMaxM2ForCausalLM": _adapt_minimax,
    "OlmoeForCausalLM": _adapt_olmoe,
    "Qwen2MoeForCausalLM": _adapt_qwen_moe,
    "Qwen3MoeForCausalLM": _adapt_qwen_moe,
}
