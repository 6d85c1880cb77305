"""Owns sampling from a nucleus (top_p, min_p) without a full sort.

The result is that of sorting tokens by descending probability, equal ones by token id; keeping a token if the
probabilities before it sum to at most `top_p` and its own is at least `min_p` times the largest; and drawing by inverse
transform in that order.
"""

from __future__ import annotations

import torch

# A nucleus is rarely larger; a row with a larger one gets a full sort.
_CANDIDATES = 1024
# The bits of numbers from 0 to 1, read as integers, are below 2**30.
_HALVINGS = 30


def sample_nucleus(
    probs: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor, uniforms: torch.Tensor
) -> torch.Tensor:
    """Draw one token per row, int64 [B]; `probs` float32 [B, vocab], `top_ps`, `min_ps`, `uniforms` [B].

    On a CPU, reading how many tokens a row keeps costs nothing. On a GPU the host would wait for it: there the smallest
    probability of the nucleus is searched, in a fixed number of passes over the row.
    """
    find = by_candidates if probs.device.type == "cpu" else by_thresholds
    return find(probs, top_ps, min_ps, uniforms)


def kept(values: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor) -> torch.Tensor:
    """Return which of `values` [B, W], in descending order, are in the nucleus: a prefix of each row."""
    before = values.cumsum(-1) - values
    return (before <= top_ps[:, None]) & (values >= values[:, :1] * min_ps[:, None])


def draw(values: torch.Tensor, keep: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw an index [B, 1] in each row by inverse transform over its kept values."""
    total = torch.where(keep, values, 0.0).double().cumsum(-1)
    threshold = uniforms[:, None] * total[:, -1:]
    return (total <= threshold).sum(-1, keepdim=True).clamp(max=values.shape[-1] - 1)


def by_sort(probs: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """As sample_nucleus, by a full sort."""
    values, tokens = probs.sort(dim=-1, descending=True, stable=True)
    return tokens.gather(1, draw(values, kept(values, top_ps, min_ps), uniforms)).squeeze(1)


def by_candidates(
    probs: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor, uniforms: torch.Tensor
) -> torch.Tensor:
    """As sample_nucleus, by a sort of the largest values, and a full sort of rows whose nucleus does not end there."""
    if probs.shape[-1] <= _CANDIDATES or bool(((probs.amax(-1) * _CANDIDATES < top_ps) & (min_ps == 0)).all()):
        return by_sort(probs, top_ps, min_ps, uniforms)  # the candidates' sum is below top_p
    values, tokens = probs.topk(_CANDIDATES, dim=-1)
    # topk gives equal values in any order.
    tokens, order = tokens.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    tokens = tokens.gather(1, order)
    keep = kept(values, top_ps, min_ps)
    # Values beyond the candidates may be equal to the last candidate.
    wider = (keep & (values == values[:, -1:])).any(-1)
    drawn = tokens.gather(1, draw(values, keep, uniforms)).squeeze(1)
    if bool(wider.any()):
        drawn[wider] = by_sort(probs[wider], top_ps[wider], min_ps[wider], uniforms[wider])
    return drawn


def by_thresholds(
    probs: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor, uniforms: torch.Tensor
) -> torch.Tensor:
    """As sample_nucleus, without a sort; the sums are in float64 and in another order."""
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
