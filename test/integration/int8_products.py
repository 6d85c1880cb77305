"""Owns Hugging Face's models with the products that an engine computes with cpu_activations=int8."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from int8_reference import product, rounded_rows


@contextmanager
def int8_products(*exact_outputs: int) -> Iterator[None]:
    """Inside, torch's linear layers round rows and weights, but for weights of so many outputs.

    Those are the model's vocabulary and its experts, which the output projection and routers have.
    """
    plain = F.linear
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if len(weight) in exact_outputs:
            return plain(rows, weight, bias)
        if weight.data_ptr() not in kept:
            rounded, scales = rounded_rows(weight.detach())
            kept[weight.data_ptr()] = rounded.to(torch.int8), scales[:, 0]
        out = product(rows.flatten(0, -2), *kept[weight.data_ptr()]).view(*rows.shape[:-1], -1)
        return (out if bias is None else out + bias).to(rows.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", linear)
        yield
