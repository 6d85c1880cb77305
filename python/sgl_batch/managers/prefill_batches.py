"""Owns the batches that compute prompts: prefill groups, chunks with a decode step, and choices after their leader.

core/ decides which prompts are computed, and how much of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sgl_batch.core.actions import Prefill, Step
from sgl_batch.core.admission import Admission
from sgl_batch.core.coroutine import Event
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.core.primitives import combine
from sgl_batch.core.recomputation import note_prefill
from sgl_batch.core.sequence import SequenceState, Status
from sgl_batch.kv_offload.kv_form import KVForm
from sgl_batch.managers.sequence_removal import Unbatched
from sgl_batch.managers.sequence_table import SequenceTable
from sgl_batch.metrics.counters import Counters
from sgl_batch.sglang_adapter.scheduling import end_retraction, keep_prefix, prefill_batch
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch
from sgl_batch.sglang_adapter.types.requests import Request
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler

_WHOLE: Mapping[str, int] = {}


class PrefillBatches:
    """Makes batches of sequences from `unbatched`, and updates `unbatched.begun`, whose prompt is computed in part."""

    def __init__(
        self,
        scheduler: SGLangScheduler,
        in_force: PlanInForce,
        table: SequenceTable,
        unbatched: Unbatched,
        kv: KVForm,
        counters: Counters,
    ) -> None:
        self._scheduler, self._in_force, self._table = scheduler, in_force, table
        self._unbatched, self._kv, self._counters = unbatched, kv, counters

    def group(self, action: Prefill) -> ScheduleBatch:
        """Return the batch of a prefill group."""
        self._admit(action.units)
        leaders = [unit.leader for unit in action.units]
        if action.rest is not None:
            leaders.insert(0, action.rest.sequence)
        requests = self._requests(leaders)
        why = f"prefill group of {len(requests)}"
        return self._kv.prefill(requests, action.on_device, lambda: self._batch(requests, why))

    def chunks(self, action: Step) -> ScheduleBatch:
        """Return the batch of the chunks of prompts that are computed in the same pass as a decode step."""
        sequences = [chunk.sequence for chunk in action.prefill]
        self._admit([Admission(leader=s) for s in sequences if s.status is Status.QUEUED])
        requests = self._requests(sequences)
        ends = {chunk.sequence.sequence_id: chunk.start + chunk.tokens for chunk in action.prefill}
        self._counters.add("prompt_tokens_mixed", sum(chunk.tokens for chunk in action.prefill))
        why = "its prompt is computed with decode rows"
        return self._kv.prefill(requests, action.on_device, lambda: self._batch(requests, why, ends))

    def choices(self, most: int) -> ScheduleBatch:
        """Return the batch that computes the last prompt token of up to `most` choices whose leader did the rest."""
        taken, self._unbatched.forked = self._unbatched.forked[:most], self._unbatched.forked[most:]
        return self._batch(taken, "its prompt was computed by its leader")

    def _requests(self, sequences: Sequence[SequenceState]) -> list[Request]:
        return [self._table.request_named(sequence.sequence_id) for sequence in sequences]

    def _admit(self, units: Sequence[Admission]) -> None:
        """Take units out of the queue, and reserve the pages that they can need."""
        for unit in units:
            self._kv.match_and_insert(unit, self._table.request_named(unit.leader.sequence_id), self._in_force.plan)
            if unit.followers:
                self._unbatched.followers[unit.leader.prompt_group or ""] = self._requests(unit.followers)
        taken = {member.sequence_id for unit in units for member in unit.members}
        queue = self._scheduler.waiting_queue
        queue[:] = [request for request in queue if request.rid not in taken]
        for name in taken:
            self._unbatched.queued.remove(name)

    def _batch(self, requests: list[Request], why: str, ends: Mapping[str, int] = _WHOLE) -> ScheduleBatch:
        sequences = [self._table[request.rid] for request in requests]
        new = [sequence for sequence in sequences if sequence.status is Status.QUEUED]
        self._table.record(combine(new, Event.COMBINE_PREFILL, why))
        batch = prefill_batch(self._scheduler, requests, ends)
        self._count_recomputed(sequences, batch)
        return batch

    def _count_recomputed(self, sequences: list[SequenceState], batch: ScheduleBatch) -> None:
        for sequence, start, length in zip(sequences, batch.prefix_lens, batch.extend_lens, strict=True):
            again = note_prefill(sequence, start, start + length)
            self._counters.add("recomputed_tokens_planned", again.planned)
            self._counters.add("recomputed_tokens_unplanned", again.unplanned)

    # After a forward pass.

    def fork_choices(self, batch: ScheduleBatch) -> None:
        """Fork the choices of the leaders in this batch, while the leaders still hold all their pages."""
        for request in batch.reqs:
            sequence = self._table[request.rid]
            group = sequence.prompt_group
            if group is not None and sequence.is_leader and group in self._unbatched.followers:
                followers = self._unbatched.followers.pop(group)
                with self._counters.clock.part("copies"):
                    self._fork(request, followers)
                self._counters.add("prompts_shared", len(followers))

    def _fork(self, leader: Request, followers: list[Request]) -> None:
        for follower in followers:
            if self._kv.fork(leader, follower):
                self._unbatched.forked.append(follower)
            else:
                self._table.forked(follower.rid)

    def count_results(self, batch: ScheduleBatch, requests: list[Request]) -> None:
        """Count the tokens of a prefill batch, and note which of these requests has its prompt computed in part."""
        again, rows_again = end_retraction(batch)
        cut = [request for request in requests if self._is_cut(request)]
        assert len(cut) <= 1, "at most one prompt is computed in part at a time"
        self._counters.add("output_tokens", len(requests) - again - len(cut))
        self._counters.add("prompt_tokens", batch.extend_num_tokens - rows_again)
        if cut or self._unbatched.begun in requests:
            self._unbatched.begun = cut[0] if cut else None

    def _is_cut(self, request: Request) -> bool:
        sequence = self._table[request.rid]
        return sequence.computed_tokens < sequence.kv_tokens

    def keep_begun(self) -> None:
        """Let the prompt that is computed in part continue after the KV that it has on the device."""
        if self._unbatched.begun is not None:
            keep_prefix(self._scheduler, self._unbatched.begun)
