"""The operators that change logits and choose tokens, typed; `sgl_batch_kernel` has them, too."""

from __future__ import annotations

from typing import NamedTuple

import torch

_ops = torch.ops.sgl_batch_kernel


def argmax(rows_TV: torch.Tensor) -> torch.Tensor:
    """Where the largest number of each row is, the first of equal ones: int64 [T]. NaN is larger than all others.

    Rows of bfloat16 or float32 may lie apart (stride(0) > V).
    """
    out: torch.Tensor = _ops.argmax(rows_TV)
    return out


class LogProbabilities(NamedTuple):
    """Of rows [T]. A token's is (its logit - largest) / temperature - log_sum."""

    of_tokens_T: torch.Tensor  # f32
    top_values_TK: torch.Tensor  # f32
    top_tokens_TK: torch.Tensor  # int64
    largest_T: torch.Tensor  # f32: logits
    log_sums_T: torch.Tensor  # f32


def log_probabilities(
    logits_TV: torch.Tensor, tokens_T: torch.Tensor, top: int = 0, temperatures_T: torch.Tensor | None = None
) -> LogProbabilities:
    """Return the log probability of one token of each row (int64), and of the `top` likeliest ones.

    That is their log softmax over `temperatures` (f32; without them 1). Likeliest tokens come in descending order of
    their logits, equal ones by token. `logits` are f32, rows may lie apart. A row's result depends on that row alone.
    Where it has none, because a logit is NaN or infinity or all are minus infinity, it is NaN.
    """
    return LogProbabilities(*_ops.log_probabilities(logits_TV, tokens_T, top, temperatures_T))


def mask_tokens(logits_TV: torch.Tensor, allowed_TW: torch.Tensor) -> None:
    """Set the logits of tokens to minus infinity that a row does not allow; bf16 or f32, rows may lie apart.

    `allowed_TW`: int32, whose bits, the lowest first, are set for allowed tokens. Tokens behind them stay as they are.
    """
    _ops.mask_tokens(logits_TV, allowed_TW)


def penalize_repetition(logits_TV: torch.Tensor, penalties_TV: torch.Tensor) -> None:
    """Multiply logits below 0 by their penalties, and divide the others by them; f32 both."""
    _ops.penalize_repetition(logits_TV, penalties_TV)


def sample(
    probs_TV: torch.Tensor,
    top_ks_T: torch.Tensor,
    top_ps_T: torch.Tensor,
    min_ps_T: torch.Tensor,
    uniforms_T: torch.Tensor,
    temperatures_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw a token from each row of probabilities by a number from [0, 1) of its own: int64 [T].

    Tokens are sorted by descending probability, equal ones by token; the first `top_ks` (int32; from 2**30 on: all) are
    kept, of these a token if those before it sum to at most `top_ps`, and of these the ones of at least `min_ps` times
    the largest (f32). `uniforms` (f64) times the sum of what is kept are the places of the tokens drawn in that order,
    and in rows without filters in the order of tokens. `probs` are f32; rows may lie apart. A row's result depends on
    that row alone. With `temperatures` (f32), `probs` are logits, and tokens are drawn from their softmax over these.
    Where that has no value, because a logit is NaN or infinity or all are minus infinity, the token is 0.
    """
    out: torch.Tensor = _ops.sample(probs_TV, top_ks_T, top_ps_T, min_ps_T, uniforms_T, temperatures_T)
    return out
