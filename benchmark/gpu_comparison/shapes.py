"""Owns the shapes of the measured models: their sizes, and the directory from which an engine loads one.

There is nothing in the directory but a config.json: weights are SGLang's dummy ones, prompts are token ids.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from random_checkpoint import model_config

ITEM_BYTES = 2  # bfloat16, of weights and of KV
LEAST_HEAD_DIM = 64  # the least that SGLang's fused write of rotated keys to KV supports on CUDA


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A Qwen3-MoE model with experts in all layers. Widths are in channels, `vocabulary` and `context` in tokens."""

    name: str
    layers: int
    hidden: int
    experts: int
    top_k: int
    expert_width: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int

    def __post_init__(self) -> None:
        assert self.head_dim >= LEAST_HEAD_DIM, f"heads of {self.head_dim} channels do not run on a GPU"

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * ITEM_BYTES

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert of one layer."""
        return 3 * self.hidden * self.expert_width * ITEM_BYTES

    @property
    def all_expert_bytes(self) -> int:
        return self.layers * self.experts * self.expert_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, without norms, which are a few channels each."""
        heads = (2 * self.query_heads + 2 * self.kv_heads) * self.head_dim
        layer = (heads + self.experts) * self.hidden * ITEM_BYTES
        return self.layers * layer + self.all_expert_bytes + 2 * self.vocabulary * self.hidden * ITEM_BYTES

    @property
    def token_flop(self) -> int:
        """Operations of one token's products in all layers, without attention over other tokens."""
        heads = (2 * self.query_heads + 2 * self.kv_heads) * self.head_dim
        layer = (heads + self.experts) * self.hidden + 3 * self.top_k * self.hidden * self.expert_width
        return 2 * self.layers * layer

    @property
    def head_flop(self) -> int:
        """Operations of one token's logits."""
        return 2 * self.vocabulary * self.hidden

    @property
    def attention_flop(self) -> int:
        """Operations of a query with one token's keys and values, in all layers."""
        return 4 * self.layers * self.query_heads * self.head_dim

    def config(self) -> dict[str, Any]:
        """Return the model's config.json."""
        return {
            **model_config(self.layers, self.expert_width),
            "hidden_size": self.hidden,
            "vocab_size": self.vocabulary,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "num_attention_heads": self.query_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context,
        }

    def write(self, directory: Path) -> Path:
        """Make the model directory for an engine."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config(), indent=2) + "\n", encoding="utf-8")
        return directory


def qwen3_30b(layers: int) -> ModelShape:
    """Return Qwen3-30B-A3B with this number of layers; it has 48 itself."""
    return ModelShape(
        name=f"Qwen3-30B-A3B with {layers} layers" if layers != 48 else "Qwen3-30B-A3B",
        layers=layers,
        hidden=2048,
        experts=128,
        top_k=8,
        expert_width=768,
        query_heads=32,
        kv_heads=4,
        head_dim=128,
        vocabulary=151936,
        context=40960,
    )


def tiny(layers: int) -> ModelShape:
    """Return a shape small enough for stock SGLang on a CPU; it tests the benchmark, not speed."""
    return ModelShape(
        name=f"a tiny Qwen3-MoE with {layers} layers",
        layers=layers,
        hidden=128,
        experts=8,
        top_k=2,
        expert_width=64,
        query_heads=4,
        kv_heads=2,
        head_dim=64,
        vocabulary=1024,
        context=4096,
    )
