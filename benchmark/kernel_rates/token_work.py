"""Owns the measured choices of tokens: what changes logits before, and what draws from their softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from xgrammar import apply_token_bitmask_inplace

from kernel_rates.work import Work
from sgl_batch.layers.counter_sampler import sample_top_k, sample_unfiltered, width_of
from sgl_batch.sglang_adapter.layers import TOP_K_ALL

TABLE = "choice of tokens"
# Standard deviations of random logits: models are sure of most tokens, random weights of none.
_SURE, _UNSURE = 6.0, 0.6
# Rows of the table, top_k, top_p and the logits' standard deviation.
_DRAWS = (
    ("temperature", TOP_K_ALL, 1.0, _SURE),
    ("top_k 20", 20, 1.0, _SURE),
    ("top_p 0.95, few tokens", TOP_K_ALL, 0.95, _SURE),
    ("top_p 0.95, most tokens", TOP_K_ALL, 0.95, _UNSURE),
)


def token_work(kernels: Any, vocabulary: int, batches: list[int]) -> Iterator[Work]:
    """Return what a step does with the logits of so many sequences, compared with torch's and xgrammar's operators."""
    for rows in batches:
        logits = torch.randn(rows, vocabulary)
        add = partial(_beside, logits)
        yield from add("greedy", 1, partial(kernels.argmax, logits), "torch", partial(torch.argmax, logits, -1))
        for name, top_k, top_p, spread in _DRAWS:
            yield from add(name, 1, *_draws(kernels, spread * logits, top_k, top_p))
        words = torch.randint(-(1 << 31), (1 << 31) - 1, (rows, -(-vocabulary // 32)), dtype=torch.int64)
        given = logits.clone(), words.int()
        theirs = partial(apply_token_bitmask_inplace, *given)
        yield from add("grammar", 2, partial(kernels.mask_tokens, *given), "xgrammar", theirs)
        given = logits.clone(), torch.where(torch.rand(logits.shape) < 0.01, 1.05, 1.0)
        yield from add("penalty", 3, partial(kernels.penalize_repetition, *given), "torch", partial(_penalize, *given))


def _draws(
    kernels: Any, logits: torch.Tensor, top_k: int, top_p: float
) -> tuple[Callable[[], object], str, Callable[[], object]]:
    rows, vocabulary = logits.shape
    uniforms, top_ks = torch.rand(rows, dtype=torch.float64), torch.full((rows,), top_k, dtype=torch.int32)
    cut = top_ks, torch.full((rows,), top_p), torch.zeros(rows)
    temperatures = torch.full((rows,), 0.9)

    def theirs() -> torch.Tensor:
        probs = torch.softmax(logits / temperatures[:, None], dim=-1)
        if top_k == TOP_K_ALL and top_p == 1.0:
            return sample_unfiltered(probs, uniforms)
        return sample_top_k(probs, width_of(top_k, vocabulary), *cut, uniforms)

    return partial(kernels.sample, logits, *cut, uniforms, temperatures), "torch", theirs


def _penalize(logits: torch.Tensor, penalties: torch.Tensor) -> None:
    """As SGLang does."""
    logits[:] = torch.where(logits < 0, logits * penalties, logits / penalties)


def _beside(
    logits: torch.Tensor, name: str, passes: int, ours: Callable[[], object], by: str, theirs: Callable[[], object]
) -> Iterator[Work]:
    """Return the work of both; `passes`: how often as many bytes as the logits have must be read or written."""
    for whose, run in (("sgl_batch", ours), (by, theirs)):
        row = f"{name}, {len(logits)} rows"
        yield Work(table=TABLE, row=row, by=whose, flops=0.0, num_bytes=float(passes * logits.nbytes), run=run)
