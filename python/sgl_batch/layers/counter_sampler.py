"""Owns sampling with counter-based randomness: a sample depends on (seed, position) and the row's logits alone.

It decides nothing about seeds; the choice index is folded into the seed where requests are taken in.
"""

from __future__ import annotations

from typing import Any

import torch

from sgl_batch.sglang_adapter.layers import TOP_K_ALL, Sampler

_GOLDEN = -7046029254386353131  # 2**64 / golden ratio, as a signed 64-bit integer (splitmix64)
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685
# Sorting and adding up take several copies of the probabilities: so many rows at a time as these bytes hold. A GPU's
# memory is larger, and each of its launches takes a microsecond of the host for any number of rows.
_SCRATCH_BYTES = 48 << 20
_GPU_SCRATCH_BYTES = 2 << 30
_BYTES_PER_PROBABILITY = 48


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def counter_uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One uniform number in [0, 1) per row, from splitmix64 over (seed, position); float64.

    `seeds`, `positions`: int64 [B]. No state, so nothing migrates with a sequence (invariant 0).
    """
    x = seeds.to(torch.int64)
    for addend in (torch.ones_like(x), positions.to(torch.int64) + 1):
        x = x + addend * _GOLDEN
        x = (x ^ _shift_right(x, 30)) * _MIX_1
        x = (x ^ _shift_right(x, 27)) * _MIX_2
        x = x ^ _shift_right(x, 31)
    return _shift_right(x, 11).to(torch.float64) * 2.0**-53


def _width(top_k: int, vocab_size: int) -> int:
    """How many of the largest probabilities to sort for a row: depends on the row alone, never on neighbours."""
    return vocab_size if top_k >= TOP_K_ALL or 2 * top_k > vocab_size else 1 << (top_k - 1).bit_length()


def sample_rows(
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """Sample one token per row by inverse transform; int64 [B].

    `probs`: [B, vocab] float32 after softmax. Filters keep, in descending order of probability, the first
    `top_ks` tokens, those before which at most `top_ps` has been kept, and those of at least `min_ps` times
    the largest. Rows are grouped by how much of them must be sorted; the group does not change a row's result.
    """
    vocab_size = probs.shape[-1]
    out = torch.empty(len(probs), dtype=torch.int64, device=probs.device)
    widths = torch.tensor([_width(int(k), vocab_size) for k in top_ks.tolist()], device=probs.device)
    for width in widths.unique().tolist():
        rows = torch.nonzero(widths == width).squeeze(1)
        if width < vocab_size:
            values, tokens = probs[rows].topk(width, dim=-1)
        else:
            values, tokens = probs[rows].sort(dim=-1, descending=True, stable=True)
        before = values.cumsum(-1) - values
        ranks = torch.arange(width, device=probs.device)
        keep = (ranks < top_ks[rows, None]) & (before <= top_ps[rows, None])
        keep &= values >= values[:, :1] * min_ps[rows, None]
        total = torch.where(keep, values, 0.0).double().cumsum(-1)
        threshold = uniforms[rows, None] * total[:, -1:]
        chosen = (total <= threshold).sum(-1).clamp(max=width - 1)
        out[rows] = tokens.gather(1, chosen[:, None]).squeeze(1)
    return out


def sample_unfiltered(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Sample rows that no filter narrows: inverse transform over the vocabulary as it lies, without a sort."""
    total = probs.double().cumsum(-1)
    threshold = uniforms[:, None] * total[:, -1:]
    return (total <= threshold).sum(-1).clamp(max=probs.shape[-1] - 1)


def _few_rows(mask: torch.Tensor, vocab_size: int) -> list[torch.Tensor]:
    """The rows of a mask, as many at a time as the scratch memory of sampling is for; a row knows no neighbour."""
    rows = torch.nonzero(mask).squeeze(1)
    scratch = _SCRATCH_BYTES if rows.device.type == "cpu" else _GPU_SCRATCH_BYTES
    return list(rows.split(max(1, scratch // (_BYTES_PER_PROBABILITY * vocab_size)))) if len(rows) else []


class CounterSampler(Sampler):  # type: ignore[misc]
    """SGLang's sampler with our draw. Every row carries a seed; greedy rows take the largest logit."""

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int] | None],
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """The rows' tokens. Beside a row that names tokens for log probabilities, SGLang needs all to name some."""
        if return_logprob and any(ids is not None for ids in token_ids_logprobs):
            token_ids_logprobs = [ids or [] for ids in token_ids_logprobs]
        tokens: torch.Tensor = super().forward(
            logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions
        )
        return tokens

    def _sample_from_probs(
        self, probs: torch.Tensor, sampling_info: Any, positions: torch.Tensor, simple_sampling_case: bool
    ) -> torch.Tensor:
        seeds = sampling_info.sampling_seed
        assert seeds is not None, "the scheduler gives every row a seed"
        uniforms = counter_uniform(seeds, positions)
        top_ks = sampling_info.top_ks
        filtered = (top_ks < TOP_K_ALL) | (sampling_info.top_ps != 1.0) | (sampling_info.min_ps > 0)
        greedy = top_ks <= 1
        out = probs.argmax(-1)
        for plain in _few_rows(~filtered & ~greedy, probs.shape[-1]):
            out[plain] = sample_unfiltered(probs[plain], uniforms[plain])
        for rows in _few_rows(filtered & ~greedy, probs.shape[-1]):
            top_ps, min_ps = sampling_info.top_ps[rows], sampling_info.min_ps[rows]
            out[rows] = sample_rows(probs[rows], top_ks[rows], top_ps, min_ps, uniforms[rows])
        return out
