"""Owns the writing of a random dense Qwen3 checkpoint, by default in the shape of Qwen3-0.6B; see random_checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from random_checkpoint import HIDDEN, INIT_STD, attention, normal, ones, write_checkpoint

from sgl_batch.errors import ConfigError

LAYERS = 28
WIDTH = 3072
QUERY_HEADS = 16
KV_HEADS = 8
HEAD_DIM = 128
VOCABULARY = 151936


def make_dense_checkpoint(directory: Path, tokenizer_from: Path, layers: int, progress: Callable[[str], None]) -> int:
    """Write the checkpoint and return its number of parameters. Raises ConfigError if `directory` is in use."""
    if layers < 1:
        raise ConfigError(f"--make-model-layers is {layers}; a model has at least 1 layer")
    generator = torch.Generator().manual_seed(0)
    blocks = [partial(_embeddings, generator), *(partial(_layer, layer, generator) for layer in range(layers))]
    return write_checkpoint(directory, tokenizer_from, dense_config(layers), blocks, progress)


def _embeddings(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Make the embedding, which is also the output projection."""
    return {
        "model.embed_tokens.weight": normal(generator, VOCABULARY, HIDDEN),
        "model.norm.weight": ones(HIDDEN),
    }


def _layer(layer: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Make the tensors of one layer under the key names of released Qwen3 checkpoints."""
    prefix = f"model.layers.{layer}"
    return {
        **attention(prefix, generator, queries=QUERY_HEADS * HEAD_DIM, keys=KV_HEADS * HEAD_DIM, head_dim=HEAD_DIM),
        f"{prefix}.mlp.gate_proj.weight": normal(generator, WIDTH, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": normal(generator, WIDTH, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": normal(generator, HIDDEN, WIDTH),
    }


def dense_config(layers: int) -> dict[str, Any]:
    """Return the checkpoint's config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": layers,
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "intermediate_size": WIDTH,
        "num_attention_heads": QUERY_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "max_position_embeddings": 4096,
        "max_window_layers": layers,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "initializer_range": INIT_STD,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
