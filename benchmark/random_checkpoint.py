"""Owns the writing of a random Qwen3-MoE checkpoint of a given depth, to measure speed.

Tensors are written straight into safetensors files, so that no model of this size has to be instantiated.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
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
    generator = torch.Generator().manual_seed(0)
    layer_blocks = (partial(_layer, layer, generator, expert_width) for layer in range(layers))
    blocks = [partial(_embeddings, generator), *layer_blocks]
    return write_checkpoint(directory, tokenizer_from, model_config(layers, expert_width), blocks, progress)


def write_checkpoint(
    directory: Path,
    tokenizer_from: Path,
    config: dict[str, Any],
    blocks: Sequence[Callable[[], dict[str, torch.Tensor]]],
    progress: Callable[[str], None],
) -> int:
    """Write the tensors of each block, the embeddings first and then layer after layer; see make_checkpoint."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} already holds files; name a new directory, or delete it first")
    directory.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    parameters = total_bytes = 0
    for number, block in enumerate(blocks):
        tensors = block()
        file_name = f"model-layer-{number - 1:03d}.safetensors" if number else "model-embeddings.safetensors"
        save_file(tensors, directory / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file_name))
        parameters += sum(tensor.numel() for tensor in tensors.values())
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
        progress(f"{number} of {len(blocks) - 1} layers written")
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)
    _write_json(directory / "config.json", config)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(tokenizer_from / name, directory / name)
    return parameters


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.empty(*shape).normal_(0.0, INIT_STD, generator=generator).bfloat16()


def ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16)


def attention(
    prefix: str, generator: torch.Generator, *, queries: int, keys: int, head_dim: int
) -> dict[str, torch.Tensor]:
    """Make the norms and attention of a layer of HIDDEN channels; `queries`, `keys`: channels of all their heads."""
    return {
        f"{prefix}.input_layernorm.weight": ones(HIDDEN),
        f"{prefix}.post_attention_layernorm.weight": ones(HIDDEN),
        f"{prefix}.self_attn.q_norm.weight": ones(head_dim),
        f"{prefix}.self_attn.k_norm.weight": ones(head_dim),
        f"{prefix}.self_attn.q_proj.weight": normal(generator, queries, HIDDEN),
        f"{prefix}.self_attn.k_proj.weight": normal(generator, keys, HIDDEN),
        f"{prefix}.self_attn.v_proj.weight": normal(generator, keys, HIDDEN),
        f"{prefix}.self_attn.o_proj.weight": normal(generator, HIDDEN, queries),
    }


def _embeddings(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "model.embed_tokens.weight": normal(generator, VOCABULARY, HIDDEN),
        "model.norm.weight": ones(HIDDEN),
        "lm_head.weight": normal(generator, VOCABULARY, HIDDEN),
    }


def _layer(layer: int, generator: torch.Generator, expert_width: int) -> dict[str, torch.Tensor]:
    """Make the tensors of one layer under the key names of released Qwen3-MoE checkpoints."""
    prefix = f"model.layers.{layer}"
    tensors = attention(prefix, generator, queries=QUERY_HEADS * HEAD_DIM, keys=KV_HEADS * HEAD_DIM, head_dim=HEAD_DIM)
    tensors[f"{prefix}.mlp.gate.weight"] = normal(generator, EXPERTS, HIDDEN)
    for expert in range(EXPERTS):
        name = f"{prefix}.mlp.experts.{expert}"
        tensors[f"{name}.gate_proj.weight"] = normal(generator, expert_width, HIDDEN)
        tensors[f"{name}.up_proj.weight"] = normal(generator, expert_width, HIDDEN)
        tensors[f"{name}.down_proj.weight"] = normal(generator, HIDDEN, expert_width)
    return tensors


def model_config(layers: int, expert_width: int = EXPERT_WIDTH) -> dict[str, Any]:
    """Return the checkpoint's config.json."""
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
