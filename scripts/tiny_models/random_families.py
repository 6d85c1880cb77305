"""Owns the table of small models of random weights, by family; does not draw weights or write checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

SHARED = {
    "vocab_size": 3072,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
KIMI_POSITIONS = {
    "type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class RandomFamily:
    """A small model of a family.

    `settings`: entries of its config besides SHARED, by transformers' names; `hub`: entries in which a published
    config.json differs from what transformers writes, None for those that it lacks (positions and the number type are
    put into the published form for all). `read_otherwise`: those that transformers reads otherwise from the published
    form. `further_layer`: published with a layer behind the last, which predicts a further token. `scales`: factors on
    the standard deviation of the weights whose names have the given ending. `experts`: whether layers have experts,
    which then lie on several ranks and are streamed.
    """

    name: str
    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    hub: Mapping[str, Any] = field(default_factory=dict)
    read_otherwise: Sequence[str] = ()
    further_layer: bool = False
    scales: Mapping[str, float] = field(default_factory=dict)
    experts: bool = False
    seed: int = 0


FAMILIES = (
    RandomFamily(
        name="qwen3",
        model_type="qwen3",
        settings={"head_dim": 32, "intermediate_size": 160, "rope_theta": 1e6},
    ),
    RandomFamily(
        name="qwen3-tied",
        model_type="qwen3",
        settings={"head_dim": 32, "intermediate_size": 160, "tie_word_embeddings": True},
    ),
    RandomFamily(name="qwen2", model_type="qwen2", settings={"intermediate_size": 160}),
    RandomFamily(
        name="llama3",
        model_type="llama",
        settings={
            "intermediate_size": 160,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    RandomFamily(
        name="mistral",
        model_type="mistral",
        settings={"head_dim": 32, "intermediate_size": 160, "sliding_window": None},
    ),
    RandomFamily(
        name="mixtral",
        model_type="mixtral",
        settings={"intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2},
        experts=True,
    ),
    RandomFamily(
        name="qwen2-moe",
        model_type="qwen2_moe",
        settings={
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "num_experts": 8,
            "num_experts_per_tok": 3,
        },
        experts=True,
    ),
    RandomFamily(
        name="qwen3-moe-dense-layers",
        model_type="qwen3_moe",
        settings={
            "num_hidden_layers": 6,
            "head_dim": 24,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
        },
        scales={"down_proj.weight": 2.0},
        experts=True,
    ),
    RandomFamily(
        name="olmoe",
        model_type="olmoe",
        settings={
            "intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-2,
        },
        experts=True,
    ),
    RandomFamily(
        name="glm4-moe",
        model_type="glm4_moe",
        settings={
            "num_hidden_layers": 3,
            "head_dim": 32,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_nextn_predict_layers": 1,
        },
        hub={"partial_rotary_factor": 0.5},
        further_layer=True,
        experts=True,
    ),
    RandomFamily(
        name="kimi-k2",
        model_type="deepseek_v3",
        settings={
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "n_routed_experts": 24,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.827,
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "max_position_embeddings": 131072,
            "rope_theta": 50000.0,
            "rope_scaling": KIMI_POSITIONS,
        },
        hub={
            "model_type": "kimi_k2",
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 0,
            "rope_scaling": KIMI_POSITIONS,
        },
        read_otherwise=("model_type",),
        experts=True,
    ),
    RandomFamily(
        name="minimax-m2",
        model_type="minimax_m2",
        settings={
            "head_dim": 32,
            "intermediate_size": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        },
        hub={
            "rotary_dim": 16,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "use_mtp": True,
            "num_mtp_modules": 3,
            "mtp_transformer_layers": 1,
            "attn_type_list": [1, 1],
            "shared_intermediate_size": 0,
            "mlp_intermediate_size": 8192,
        },
        read_otherwise=("rope_parameters",),
        experts=True,
    ),
    RandomFamily(
        name="gpt-oss",
        model_type="gpt_oss",
        settings={
            "head_dim": 32,
            "intermediate_size": 96,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "swiglu_limit": 7.0,  # the only value that transformers supports
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
        scales={"self_attn.sinks": 5.0, "_bias": 3.0, "gate_up_proj": 10.0, "down_proj": 0.1},
        experts=True,
    ),
)

# V2's routing: softmax scores, the best groups, queries without a latent. Transformers cannot run it as it
# is: it reads a number of its block of experts that it never sets.
DEEPSEEK_V2 = RandomFamily(
    name="deepseek-v2",
    model_type="deepseek_v2",
    settings={
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 8.0,
        "moe_layer_freq": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    experts=True,
)
# SGLang's kernels for GPUs write KV of heads of 64 channels and more; those for latents know the published sizes.
_GPU_HEADS = {"head_dim": 64}
_GPU_LATENTS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
# Half of the channels, as in the settings.
_GPU_HUB = {"rotary_dim": 32}
# With these, rounding to bfloat16 moves logits by some hundredths, a tenth of the usual gap between the best two, and
# what came before a token by some tenths. Rounding changes choices of experts, too: each has little weight.
_GPU_SCALES = {
    "lm_head.weight": 2.4,
    "embed_tokens.weight": 3.0,
    ".gate.weight": 3.0,
    ".router.weight": 3.0,
    "experts.down_proj": 0.25,
    "": 0.5,
}


def for_gpu(name: str) -> RandomFamily:
    """Return the family of a name with head sizes that SGLang's GPU kernels support, called random-NAME."""
    family = next(family for family in (*FAMILIES, DEEPSEEK_V2) if family.name == name)
    heads = _GPU_LATENTS if "kv_lora_rank" in family.settings else _GPU_HEADS
    return replace(
        family,
        name=f"random-{name}",
        settings={**family.settings, "hidden_size": 256, **heads},
        hub={**family.hub, **{key: value for key, value in _GPU_HUB.items() if key in family.hub}},
        scales={**family.scales, **_GPU_SCALES},
    )
