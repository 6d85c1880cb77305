"""Owns the measured shape on a CPU: that of the other benchmarks' checkpoint."""

from __future__ import annotations

import random_checkpoint as made
from gpu_comparison.shapes import ModelShape


def offline_shape(layers: int = 12) -> ModelShape:
    """Return the shape of the random Qwen3-MoE of `offline.py --make-model`."""
    return ModelShape(
        name=f"the random Qwen3-MoE of offline.py, {layers} layers",
        layers=layers,
        hidden=made.HIDDEN,
        experts=made.EXPERTS,
        top_k=made.TOP_K,
        expert_width=made.EXPERT_WIDTH,
        query_heads=made.QUERY_HEADS,
        kv_heads=made.KV_HEADS,
        head_dim=made.HEAD_DIM,
        vocabulary=made.VOCABULARY,
        context=40960,
    )
