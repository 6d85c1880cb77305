"""Owns the shape of a layer of experts: with the number of tokens, it decides which runner is fastest on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_batch.sglang_adapter.types.models import ExpertLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """The shape of a layer's experts on this rank. `dtype`: the number type without torch's prefix."""

    experts: int
    hidden: int
    intermediate: int
    top_k: int
    dtype: str


def shape_of(layer: ExpertLayer) -> ExpertShape:
    """Return the shape of one of SGLang's layers of experts."""
    experts, double, hidden = layer.w13_weight.shape
    dtype = str(layer.w13_weight.dtype).removeprefix("torch.")
    return ExpertShape(experts=experts, hidden=hidden, intermediate=double // 2, top_k=layer.top_k, dtype=dtype)
