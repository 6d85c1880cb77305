"""Adapts SGLang's sampling parameters of a batch: a copy of each row's parameters stays on the host.

SGLang has them on the device only. To read them there, the host would wait for all queued work of the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch

with bootstrap.importing():
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


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
