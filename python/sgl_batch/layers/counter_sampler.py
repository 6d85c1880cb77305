"""Owns sampling with counter-based randomness: a sample depends on (seed, position) and the row's logits only.

Seeds come with the requests: the tokenizer manager folds the choice index into the seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers.nucleus import draw, kept, sample_nucleus
from sgl_batch.sglang_adapter.host_copies import upload
from sgl_batch.sglang_adapter.layers import RETURN_ORIGINAL_LOGPROB, TOP_K_ALL, Sampler
from sgl_batch.sglang_adapter.log_probabilities import Asked, output_log_probabilities
from sgl_batch.sglang_adapter.sampling_rows import RowParameters

_GOLDEN = -7046029254386353131  # 2**64 / golden ratio, as a signed 64-bit integer (splitmix64)
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685
# Sorting and adding up take several copies of the probabilities: as many rows are sampled at a time as these bytes
# hold. A GPU has more memory, and each launch takes microseconds of the host for any number of rows.
_SCRATCH_BYTES = 48 << 20
_GPU_SCRATCH_BYTES = 2 << 30
_BYTES_PER_PROBABILITY = 48


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 right without its sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def counter_uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return one uniform number in [0, 1) per row, from splitmix64 over (seed, position); float64.

    `seeds`, `positions`: int64 [B]. There is no generator state that would migrate with a sequence (invariant 0).
    """
    x = seeds.to(torch.int64)
    for addend in (torch.ones_like(x), positions.to(torch.int64) + 1):
        x = x + addend * _GOLDEN
        x = (x ^ _shift_right(x, 30)) * _MIX_1
        x = (x ^ _shift_right(x, 27)) * _MIX_2
        x = x ^ _shift_right(x, 31)
    return _shift_right(x, 11).to(torch.float64) * 2.0**-53


def width_of(top_k: int, vocab_size: int) -> int:
    """Return how many of the largest probabilities to sort for a row. It depends on the row only, not on other rows."""
    return vocab_size if top_k >= TOP_K_ALL or 2 * top_k > vocab_size else 1 << (top_k - 1).bit_length()


def sample_top_k(
    probs: torch.Tensor,
    width: int,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """Draw one token per row by inverse transform, int64 [B], for rows whose `top_ks` are all of one `width`.

    `probs`: [B, vocab] float32 after softmax. In descending order of probability, the filters keep the first `top_ks`
    tokens, of these the tokens before which at most `top_ps` is kept, and of these the tokens with at least `min_ps`
    times the largest probability.
    """
    if width < probs.shape[-1]:
        values, tokens = probs.topk(width, dim=-1)
    else:
        values, tokens = probs.sort(dim=-1, descending=True, stable=True)
    keep = kept(values, top_ps, min_ps) & (torch.arange(width, device=probs.device) < top_ks[:, None])
    return tokens.gather(1, draw(values, keep, uniforms)).squeeze(1)


def sample_unfiltered(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Sample rows without filters by inverse transform over the vocabulary in its own order, without a sort."""
    total = probs.double().cumsum(-1)
    threshold = uniforms[:, None] * total[:, -1:]
    return (total <= threshold).sum(-1).clamp(max=probs.shape[-1] - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Rows of a batch that are sampled in the same way: `index` [N] on the device, or None for all `count` rows.

    `width`: the `width_of` their top_k; None for rows without filters. `only_nucleus`: they have no top_k.
    """

    width: int | None
    count: int
    index: torch.Tensor | None
    only_nucleus: bool = False

    def pieces(self, vocab_size: int, device: torch.device) -> Iterator[slice | torch.Tensor]:
        """Yield the rows, as many at a time as the scratch memory of sampling allows; rows do not affect each other."""
        scratch = _SCRATCH_BYTES if device.type == "cpu" else _GPU_SCRATCH_BYTES
        size = max(1, scratch // (_BYTES_PER_PROBABILITY * vocab_size))
        if self.index is not None:
            yield from self.index.split(size)
            return
        for start in range(0, self.count, size):
            yield slice(start, start + size)


def _groups_of(rows: Sequence[RowParameters], vocab_size: int, device: torch.device) -> list[_Group]:
    """Return the groups of a batch's rows that are not greedy."""
    found: dict[tuple[int | None, bool], list[int]] = {}
    for index, row in enumerate(rows):
        if row.top_k > 1:
            filtered = row.top_k < TOP_K_ALL or row.top_p != 1.0 or row.min_p > 0
            width = width_of(row.top_k, vocab_size) if filtered else None
            found.setdefault((width, filtered and row.top_k >= TOP_K_ALL), []).append(index)
    return [
        _Group(
            width=width,
            count=len(own),
            index=None if len(own) == len(rows) else upload(own, torch.int64, device),
            only_nucleus=only_nucleus,
        )
        for (width, only_nucleus), own in found.items()
    ]


def _kernels_for(rows: torch.Tensor) -> ModuleType | None:
    return native_kernels() if rows.device.type == "cpu" else None


def _uniforms(sampling_info: Any, positions: torch.Tensor) -> torch.Tensor:
    assert sampling_info.sampling_seed is not None, "the scheduler gives every row a seed"
    return counter_uniform(sampling_info.sampling_seed, positions)


class CounterSampler(Sampler):  # type: ignore[misc]
    """SGLang's sampler with our draw. Every row has a seed; greedy rows take the largest logit.

    On a CPU the native kernel draws for all rows, from their logits. Elsewhere rows are grouped by their filters, which
    are read on the host, from `KnownSampling`: no step waits for the device here.
    """

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int] | None],
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Return the rows' tokens. If a row names tokens for log probabilities, SGLang needs a list in every row."""
        if return_logprob and any(ids is not None for ids in token_ids_logprobs):
            token_ids_logprobs = [ids or [] for ids in token_ids_logprobs]
        kernels, tokens = _kernels_for(logits_output.next_token_logits), None
        if kernels is not None and not self.use_log_softmax_logprob:
            asked = (top_logprobs_nums, token_ids_logprobs) if return_logprob else None
            tokens = self._by_kernels(kernels, logits_output, sampling_info, asked, positions)
        if tokens is None:
            tokens = super().forward(
                logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions
            )
        return tokens

    def _by_kernels(
        self,
        kernels: ModuleType,
        logits_output: Any,
        sampling_info: Any,
        asked: Asked | None,
        positions: torch.Tensor,
    ) -> torch.Tensor | None:
        """Do what SGLang's `forward` does, but by kernels, from the logits; None for the masks of greedy rows.

        `asked`: what log probabilities each row returns.
        """
        greedy, masks = sampling_info.is_all_greedy, any(sampling_info.return_sampling_masks or [])
        if greedy and masks:
            return None
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        temperatures: torch.Tensor | None = None if greedy else sampling_info.temperatures
        if temperatures is None:
            tokens: torch.Tensor = kernels.argmax(logits)
        else:
            tokens = self._draw(kernels, logits, sampling_info, positions, temperatures)
        if asked is not None:
            over = None if RETURN_ORIGINAL_LOGPROB else temperatures
            output_log_probabilities(kernels, logits, tokens, asked, over).write_output_to(logits_output)
        if masks:
            probs = torch.softmax(logits.div_(temperatures), dim=-1)
            mask = self._compute_sampling_mask_from_probs(probs, sampling_info)
            self._attach_sampling_mask_to_output(logits_output, sampling_info, tokens, mask)
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens

    def _sample_from_probs(
        self, probs: torch.Tensor, sampling_info: Any, positions: torch.Tensor, simple_sampling_case: bool
    ) -> torch.Tensor:
        kernels = _kernels_for(probs)
        if kernels is not None:
            return self._draw(kernels, probs, sampling_info, positions)
        return self._sample_by_groups(probs, sampling_info, _uniforms(sampling_info, positions))

    def _draw(
        self,
        kernels: ModuleType,
        rows: torch.Tensor,
        sampling_info: Any,
        positions: torch.Tensor,
        temperatures: torch.Tensor | None = None,
    ) -> torch.Tensor:
        uniforms = _uniforms(sampling_info, positions)
        top_ks, top_ps, min_ps = sampling_info.top_ks, sampling_info.top_ps, sampling_info.min_ps
        tokens: torch.Tensor = kernels.sample(rows, top_ks, top_ps, min_ps, uniforms, temperatures)
        return tokens

    def _sample_by_groups(self, probs: torch.Tensor, sampling_info: Any, uniforms: torch.Tensor) -> torch.Tensor:
        rows: list[RowParameters] = sampling_info.rows
        vocab_size = probs.shape[-1]
        if sampling_info.groups is None:
            sampling_info.groups = _groups_of(rows, vocab_size, probs.device)
        groups: list[_Group] = sampling_info.groups
        num_sampled = sum(group.count for group in groups)
        out = probs.argmax(-1) if num_sampled < len(rows) else torch.empty_like(sampling_info.sampling_seed)
        for group in groups:
            for some in group.pieces(vocab_size, probs.device):
                out[some] = self._sample_group(group, probs[some], sampling_info, some, uniforms[some])
        return out

    def _sample_group(
        self,
        group: _Group,
        probs: torch.Tensor,
        sampling_info: Any,
        rows: slice | torch.Tensor,
        uniforms: torch.Tensor,
    ) -> torch.Tensor:
        if group.width is None:
            return sample_unfiltered(probs, uniforms)
        top_ps, min_ps = sampling_info.top_ps[rows], sampling_info.min_ps[rows]
        if group.only_nucleus:
            return sample_nucleus(probs, top_ps, min_ps, uniforms)
        return sample_top_k(probs, group.width, sampling_info.top_ks[rows], top_ps, min_ps, uniforms)
