"""Owns the architectures, and the writing of a checkpoint."""

import os
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GenerationConfig,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from .vocabulary import MAX_LENGTH, save_tokenizer

FAMILIES = ("qwen3-moe", "mixtral", "deepseek-v3")
# The names in the families' published checkpoints, which SGLang's loaders expect.
EXPERT_KEYS = {
    "qwen3-moe": (
        "model.layers.{layer}.mlp.gate.weight",
        "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
    ),
    "mixtral": (
        "model.layers.{layer}.block_sparse_moe.gate.weight",
        "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
    ),
    "deepseek-v3": (
        "model.layers.{layer}.mlp.gate.e_score_correction_bias",
        "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
    ),
}
# Latent attention; scores by sigmoid, with biases and groups of experts; positions stretched by YaRN, as published.
DEEPSEEK_V3 = {
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "intermediate_size": 384,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 96,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": MAX_LENGTH // 4,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    # SGLang reads its routing from these; transformers knows one routing only.
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
}


def build_model(
    family: str, tokenizer: PreTrainedTokenizerFast, *, head_dim: int = 32, initializer_range: float = 0.04
) -> PreTrainedModel:
    """Make an untrained float32 model; embeddings are untied because not all of SGLang's model files tie them.

    `head_dim`: channels of a head, of the families without latent attention.
    """
    shared = {
        "vocab_size": len(tokenizer),
        "hidden_size": 4 * head_dim,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_LENGTH,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": initializer_range,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if family == "deepseek-v3":
        return DeepseekV3ForCausalLM(DeepseekV3Config(**{**shared, **DEEPSEEK_V3}))
    shared |= {"num_key_value_heads": 2, "head_dim": head_dim}
    if family == "qwen3-moe":
        return Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **shared,
                intermediate_size=384,
                moe_intermediate_size=96,
                num_experts=16,
                num_experts_per_tok=4,
                norm_topk_prob=True,
            )
        )
    assert family == "mixtral", f"unknown family {family}"
    return MixtralForCausalLM(
        MixtralConfig(**shared, intermediate_size=192, num_local_experts=8, num_experts_per_tok=2)
    )


def save_checkpoint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, family: str, target: Path) -> None:
    """Write a bf16 checkpoint next to `target` and rename it, so that no incomplete checkpoint is loaded."""
    building = target.with_name(f".{target.name}.building-{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    model.to(torch.bfloat16).save_pretrained(building)
    save_tokenizer(tokenizer, building)
    for file in building.iterdir():
        file.chmod(0o644)
    _check_key_names(building / "model.safetensors", family, model)
    retired = target.with_name(f".{target.name}.retired-{os.getpid()}")
    if target.exists():
        target.rename(retired)
    building.rename(target)
    shutil.rmtree(retired, ignore_errors=True)


def _check_key_names(path: Path, family: str, model: PreTrainedModel) -> None:
    with safe_open(path, framework="pt") as checkpoint:
        names = set(checkpoint.keys())
    num_experts = model.config.num_local_experts
    for layer in range(getattr(model.config, "first_k_dense_replace", 0), model.config.num_hidden_layers):
        for expert in range(num_experts):
            for pattern in EXPERT_KEYS[family]:
                name = pattern.format(layer=layer, expert=expert)
                assert name in names, f"{path} lacks {name}: SGLang would not find its experts"
