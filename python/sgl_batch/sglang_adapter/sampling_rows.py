"""Adapts SGLang's sampling parameters of a batch: a copy of each row's parameters stays on the host.

SGLang has them on the device only. To read them there, the host would wait for all queued work of the device.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch

with bootstrap.importing():
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from xgrammar import BatchGrammarMatcher


_MOST_THREADS = 8  # a row's mask takes some 0.2 ms


@cache
def _filler() -> BatchGrammarMatcher:
    return BatchGrammarMatcher(max_threads=min(_MOST_THREADS, len(os.sched_getaffinity(0))))


class RowParameters(NamedTuple):
    """The filters of one row, as SGLang normalises them: top_k is 1 for greedy rows, and TOP_K_ALL for no limit."""

    top_k: int
    top_p: float
    min_p: float


@dataclass
class KnownSampling(SamplingBatchInfo):  # type: ignore[misc]
    """SGLang's sampling parameters with `rows` on the host, and the sampler's `groups` of them.

    `groups` is None after the rows have changed.
    """

    rows: list[RowParameters] = field(default_factory=list)
    groups: Any = None

    def update_regex_vocab_mask(self) -> None:
        """Mask what the rows' grammars do not allow, as SGLang does, but on several threads."""
        rows = list(enumerate(self.grammars or ()))
        grammars = [(row, one) for row, one in rows if one and not one.finished and not one.is_terminated()]
        if len(grammars) < 2 or not all(isinstance(one, XGrammarGrammar) for _, one in grammars):
            super().update_regex_vocab_mask()
            return
        some: Any = grammars[0][1]
        mask = some.allocate_vocab_mask(vocab_size=self.vocab_size, batch_size=len(rows), device=self.device)
        _filler().batch_fill_next_token_bitmask(
            [one.matcher for _, one in grammars], mask, [row for row, _ in grammars]
        )
        self.apply_mask_func = some.apply_vocab_mask
        self.vocab_mask = some.move_vocab_mask(mask, self.device)

    def adjusted_filter_batch(self, keep_indices: list[int], keep_indices_device: object) -> None:
        self.rows = [self.rows[index] for index in keep_indices]
        self.groups = None

    def adjusted_merge_batch(self, other: KnownSampling) -> None:
        self.rows = self.rows + other.rows
        self.groups = None


def keep_rows_on_host(batch: ScheduleBatch) -> None:
    """Keep the parameters of a new batch's requests on the host, also when rows leave or join."""
    info: Any = batch.sampling_info
    info.__class__ = KnownSampling
    parameters = (request.sampling_params for request in batch.reqs)
    info.rows = [RowParameters(one.top_k, one.top_p, one.min_p) for one in parameters]
    info.groups = None
