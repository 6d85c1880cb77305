"""Owns the current `RankView` of a rank: what its form of KV shows decisions of the rank's sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sgl_batch.core.kv_state import Interval
from sgl_batch.core.plan import Plan
from sgl_batch.core.sequence import SequenceState
from sgl_batch.kv_offload.prompt_sharing import PromptSharing
from sgl_batch.managers.sequence_table import SequenceTable
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch


@dataclass(frozen=True, slots=True)
class CurrentRankView:
    """A `RankView` over the sequence table. `running`: the decode batch, which only `runners` reads."""

    table: SequenceTable
    sharing: PromptSharing
    plan: Plan
    interval: Interval
    running: ScheduleBatch | None

    @property
    def choices(self) -> Sequence[SequenceState]:
        return self.table.choices

    def runners(self) -> Sequence[SequenceState]:
        assert self.running is not None, "runners are read only where the decode batch is given"
        return [self.table.grown(request) for request in self.running.reqs]

    def estimate_shared(self, sequences: Iterable[SequenceState]) -> None:
        self.sharing.estimate_shared(((s, self.table.request_named(s.sequence_id)) for s in sequences), self.plan)
