"""Owns sampling from a nucleus (top_p, min_p) with torch's operators, without a sort.

The result is that of sorting tokens by descending probability, equal ones by token id; keeping a token if the
probabilities before it sum to at most `top_p` and its own is at least `min_p` times the largest; and drawing by inverse
transform in that order.
"""

from __future__ import annotations

import torch

# The bits of numbers from 0 to 1, read as integers, are below 2**30.
_HALVINGS = 30


def kept(values: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor) -> torch.Tensor:
    """Return which of `values` [B, W], in descending order, are in the nucleus: a prefix of each row."""
    before = values.cumsum(-1) - values
    return (before <= top_ps[:, None]) & (values >= values[:, :1] * min_ps[:, None])


def draw(values: torch.Tensor, keep: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw an index [B, 1] in each row by inverse transform over its kept values."""
    total = torch.where(keep, values, 0.0).double().cumsum(-1)
    threshold = uniforms[:, None] * total[:, -1:]
    return (total <= threshold).sum(-1, keepdim=True).clamp(max=values.shape[-1] - 1)


def sample_nucleus(
    probs: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor, uniforms: torch.Tensor
) -> torch.Tensor:
    """Draw one token per row, int64 [B]; `probs` float32 [B, vocab], `top_ps`, `min_ps`, `uniforms` [B].

    How many tokens a row keeps is not read on the host, which would wait for a GPU there. The smallest probability of
    the nucleus is searched in a fixed number of passes over the row; sums are in float64.
    """
    largest = probs.amax(-1)
    least, before, ties = _reach(probs, largest * min_ps, largest, top_ps.double())
    room = ((top_ps.double() - before) / _divisor(least)).floor() + 1
    num_least = torch.minimum(room, ties.sum(-1))
    threshold = uniforms * (before + num_least * least.double())
    chosen, before, ties = _reach(probs, least, largest, threshold)
    num_chosen = torch.where(chosen == least, num_least, ties.sum(-1))
    number = ((threshold - before) / _divisor(chosen)).floor() + 1
    number = torch.minimum(number, num_chosen).clamp(min=1)
    is_drawn = ties & (ties.cumsum(-1) == number[:, None])
    return is_drawn.to(torch.uint8).argmax(-1)


def _divisor(values: torch.Tensor) -> torch.Tensor:
    return values.double().clamp(min=torch.finfo(torch.float64).tiny)


def _reach(
    probs: torch.Tensor, least: torch.Tensor, largest: torch.Tensor, limits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the smallest value from `least` to `largest` above which a row's sum is at most `limits` [B], float64.

    Returns the value [B], the sum of all values above it [B] in float64, and where the row has it [B, vocab]. It is a
    binary search over the bits of floats: positive floating-point numbers have the order of their bits.
    """
    low, high = least.view(torch.int32), largest.view(torch.int32)
    for _ in range(_HALVINGS):
        middle = low + (high - low) // 2
        enough = _sum_above(probs, middle.view(torch.float32)) <= limits
        low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
    found = high.view(torch.float32)
    return found, _sum_above(probs, found), probs == found[:, None]


def _sum_above(probs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.where(probs > values[:, None], probs, 0.0).sum(-1, dtype=torch.float64)
