"""SGLang's sampling parameters of a batch, with a copy on the host of what each row asks for.

SGLang has them on the device, where the host cannot look without waiting for all that the device was given before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch

with bootstrap.importing():
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


class RowParameters(NamedTuple):
    """The filters of one row, as SGLang normalises them: greedy is a top_k of 1, no limit is TOP_K_ALL."""

    top_k: int
    top_p: float
    min_p: float


@dataclass
class KnownSampling(SamplingBatchInfo):  # type: ignore[misc]
    """`rows`: by row. `groups`: what the sampler has made of them; None when they have changed since."""

    rows: list[RowParameters] = field(default_factory=list)
    groups: Any = None

    def adjusted_filter_batch(self, keep_indices: list[int], keep_indices_device: object) -> None:
        self.rows = [self.rows[index] for index in keep_indices]
        self.groups = None

    def adjusted_merge_batch(self, other: KnownSampling) -> None:
        self.rows = self.rows + other.rows
        self.groups = None


def keep_rows_on_host(batch: ScheduleBatch) -> None:
    """Have a new batch's sampling parameters know what its requests ask for, also when rows leave or join."""
    info: Any = batch.sampling_info
    info.__class__ = KnownSampling
    parameters = (request.sampling_params for request in batch.reqs)
    info.rows = [RowParameters(one.top_k, one.top_p, one.min_p) for one in parameters]
    info.groups = None
