"""Owns the reading of single rows of a packed weight, as an embedding that is also the output projection needs."""

from __future__ import annotations

import torch

# Columns of a panel in which weights lie packed; the last panel has those that are left (sgl-kernel/csrc/cpu/gemm.h).
_PANEL = 32


def packed_rows(weight_NK: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows [..., K] of a packed weight of bf16 or float32, whose shape is that of the plain one."""
    outputs, inputs = weight_NK.shape
    pair = 2 if weight_NK.dtype == torch.bfloat16 else 1
    flat, numbers = weight_NK.reshape(-1), ids.reshape(-1)
    whole = outputs // _PANEL * _PANEL
    found = weight_NK.new_empty(len(numbers), inputs // pair, pair)
    for first, last, width in ((0, whole, _PANEL), (whole, outputs, outputs - whole)):
        here = (numbers >= first) & (numbers < last)
        if width and bool(here.any()):
            panels = flat[first * inputs : last * inputs].view(-1, inputs // pair, width, pair)
            own = numbers[here] - first
            found[here] = panels[own // width, :, own % width]
    return found.view(*ids.shape, inputs)
