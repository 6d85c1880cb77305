"""Owns the writing of a random Qwen3-MoE checkpoint of a given depth; its weights mean nothing, its speed does.

Tensors are written straight into safetensors files, so that no model of this size has to be instantiated.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sgl_batch.errors import ConfigError

HIDDEN = 1024
EXPERTS = 64
TOP_K = 8
EXPERT_WIDTH = 384
QUERY_HEADS = 16
KV_HEADS = 4
HEAD_DIM = 64
VOCABULARY = 32000
INIT_STD = 0.02

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def make_checkpoint(
    directory: Path,
    tokenizer_from: Path,
    layers: int,
    progress: Callable[[str], None],
    *,
    expert_width: int = EXPERT_WIDTH,
) -> int:
    """Write the checkpoint and return its number of parameters. Raises ConfigError if `directory` is in use.

    `expert_width`: intermediate channels of an expert.
    """
    if layers < 1:
        raise ConfigError(f"--make-model-layers is {layers}; a model has at least 1 layer")
    if expert_width < 2 or expert_width % 2:
        raise ConfigError(f"--make-model-expert-width is {expert_width}; it takes an even number of channels")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} already holds files; name a new directory, or delete it first")
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    parameters = total_bytes = 0
    for layer in range(-1, layers):
        is_layer = layer >= 0
        tensors = _layer(layer, generator, expert_width) if is_layer else _embeddings(generator)
        file_name = f"model-layer-{layer:03d}.safetensors" if is_layer else "model-embeddings.safetensors"
        save_file(tensors, directory / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file_name))
        parameters += sum(tensor.numel() for tensor in tensors.values())
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
        progress(f"{layer + 1} of {layers} layers written")
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)
    _write_json(directory / "config.json", model_config(layers, expert_width))
    for name in _TOKENIZER_FILES:
        shutil.copyfile(tokenizer_from / name, directory / name)
    return parameters


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.empty(*shape).normal_(0.0, INIT_STD, generator=generator).bfloat16()


def _ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16)


def _embeddings(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "model.embed_tokens.weight": _normal(generator, VOCABULARY, HIDDEN),
        "model.norm.weight": _ones(HIDDEN),
        "lm_head.weight": _normal(generator, VOCABULARY, HIDDEN),
    }


def _layer(layer: int, generator: torch.Generator, expert_width: int) -> dict[str, torch.Tensor]:
    """The tensors of one layer under the key names of released Qwen3-MoE checkpoints."""
    prefix = f"model.layers.{layer}"
    tensors = {
        f"{prefix}.input_layernorm.weight": _ones(HIDDEN),
        f"{prefix}.post_attention_layernorm.weight": _ones(HIDDEN),
        f"{prefix}.self_attn.q_norm.weight": _ones(HEAD_DIM),
        f"{prefix}.self_attn.k_norm.weight": _ones(HEAD_DIM),
        f"{prefix}.self_attn.q_proj.weight": _normal(generator, QUERY_HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}.self_attn.k_proj.weight": _normal(generator, KV_HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}.self_attn.v_proj.weight": _normal(generator, KV_HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}.self_attn.o_proj.weight": _normal(generator, HIDDEN, QUERY_HEADS * HEAD_DIM),
        f"{prefix}.mlp.gate.weight": _normal(generator, EXPERTS, HIDDEN),
    }
    for expert in range(EXPERTS):
        name = f"{prefix}.mlp.experts.{expert}"
        tensors[f"{name}.gate_proj.weight"] = _normal(generator, expert_width, HIDDEN)
        tensors[f"{name}.up_proj.weight"] = _normal(generator, expert_width, HIDDEN)
        tensors[f"{name}.down_proj.weight"] = _normal(generator, HIDDEN, expert_width)
    return tensors


def model_config(layers: int, expert_width: int = EXPERT_WIDTH) -> dict[str, Any]:
    """The checkpoint's config.json."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "num_hidden_layers": layers,
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": expert_width,
        "intermediate_size": expert_width * TOP_K,
        "num_attention_heads": QUERY_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "initializer_range": INIT_STD,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
