"""Owns taking sequences out before their end: aborts, and giving up the KV of all.

Which sequences are meant is said by the caller. Requests in the running batch are SGLang's to abort.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from sgl_batch.core.sequence import SequenceState, Status
from sgl_batch.core.sequence_queue import SequenceQueue
from sgl_batch.kv_offload.kv_form import KVForm
from sgl_batch.managers.sequence_table import SequenceTable
from sgl_batch.sglang_adapter.scheduling import clear_batch, end_aborted, end_detached, mark_aborted
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch
from sgl_batch.sglang_adapter.types.requests import Request
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler


@dataclass(slots=True, kw_only=True)
class Unbatched:
    """Sequences that are in no batch and have no KV of their own: `queued` ones, and choices of prompts.

    `followers` wait for their leader's prompt, by prompt group; `forked` ones can compute its last token. `begun`: the
    request of whose prompt decode steps have computed a part; it is in a batch only while they compute more of it.
    """

    queued: SequenceQueue
    followers: dict[str, list[Request]] = field(default_factory=dict)
    forked: list[Request] = field(default_factory=list)
    begun: Request | None = None

    @property
    def num_choices(self) -> int:
        """Choices, each of which will take a place in the table of slots."""
        return sum(map(len, self.followers.values())) + len(self.forked)


class JoinArrived(Protocol):
    """Combines sequences whose KV has come to the device into the decode batch."""

    def __call__(self, running: ScheduleBatch, *, wait: bool) -> ScheduleBatch:
        """The decode batch then; with all on their way, if `wait`."""


class SequenceRemoval:
    """Takes sequences out of `table`, `unbatched` and `kv` alike."""

    def __init__(
        self,
        scheduler: SGLangScheduler,
        table: SequenceTable,
        unbatched: Unbatched,
        kv: KVForm,
        join_arrived: JoinArrived,
    ) -> None:
        self._scheduler, self._table, self._unbatched, self._kv = scheduler, table, unbatched, kv
        self._join_arrived = join_arrived

    def forget_removed(self) -> None:
        """Drop queued sequences whose requests SGLang took out of the queue (aborted, or timed out)."""
        queue, queued = self._scheduler.waiting_queue, self._unbatched.queued
        if len(queue) == len(queued):
            return
        present = {request.rid for request in queue}
        for sequence in [s for s in queued if s.sequence_id not in present]:
            queued.remove(sequence.sequence_id)
            self._table.abort_queued(sequence)

    def abort_outside_batches(self, is_meant: Callable[[str], bool]) -> None:
        """Abort the sequences in question that hold or await KV outside the running batch.

        Waiting ones end here: until the decode group has room for them, they would keep their pages and their answer.
        Those whose KV is on its way, and choices that wait for their prompt, end with the next step that has them.
        """
        for name in [s.sequence_id for s in self._table.ready if is_meant(s.sequence_id)]:
            self._end(self._table.take_ready(name))
        begun = self._unbatched.begun
        if begun is not None and is_meant(begun.rid):
            self._unbatched.begun = None
            self._end(begun)
        followers = [request for group in self._unbatched.followers.values() for request in group]
        for request in [*self._kv.returning, *self._unbatched.forked, *followers]:
            if is_meant(request.rid):
                mark_aborted(request)

    def abort(self, sequence: SequenceState, why: str) -> None:
        """End a sequence with this error, unless it is ending already. A QUEUED one has just come, and is in no queue.

        One that runs ends with its next step.
        """
        request = self._table.request_named(sequence.sequence_id)
        if request.to_finish is not None:
            return
        if sequence.status is Status.QUEUED:
            self._table.refuse(sequence, why)
            return
        mark_aborted(request, why)
        self.abort_outside_batches(lambda name: name == sequence.sequence_id)

    def _end(self, request: Request) -> None:
        """End a waiting request as aborted, with what it has generated."""
        end = end_aborted if request.req_pool_idx is not None else end_detached
        end(self._scheduler, request)
        self._table.record([self._table.finish(request)])
        self._kv.forget(request.rid)

    def abort_retracted(self, is_meant: Callable[[str], bool]) -> None:
        """Answer retracted sequences in question with what they had generated, which SGLang does not of queued ones."""
        queue = self._scheduler.waiting_queue
        ended = [request for request in queue if request.output_ids and is_meant(request.rid)]
        for request in ended:
            queue.remove(request)
            end_detached(self._scheduler, request)
        self.forget_removed()

    def retract_all(self, running: ScheduleBatch) -> None:
        """Every sequence that has KV loses it, and is queued again in its old place, to compute it anew."""
        self.forget_removed()
        queue = self._scheduler.waiting_queue
        for request in self._take_out(running):
            self._give_up_kv(request)
            if request.rid in self._table:
                queue.append(request)
        queue.sort(key=lambda request: self._table[request.rid].arrival)
        self._unbatched.queued.replace(self._table[request.rid] for request in queue)

    def _take_out(self, running: ScheduleBatch) -> list[Request]:
        """All requests that have KV, or have found it; the decode batch is empty then."""
        joined = self._join_arrived(running, wait=True)
        forked, self._unbatched.forked = self._unbatched.forked, []
        ready = [self._table.request_named(sequence.sequence_id) for sequence in self._table.ready]
        begun, self._unbatched.begun = self._unbatched.begun, None
        partly = [] if begun is None else [begun]
        found = [*(request for request in joined.reqs if not request.finished()), *ready, *forked, *partly]
        clear_batch(joined)
        clear_batch(running)  # where it was empty, those that came back are another batch
        return found

    def _give_up_kv(self, request: Request) -> None:
        """One that is to be aborted needs no other step for that."""
        self._kv.give_up(request)
        if request.to_finish is None:
            self._table.retracted(request)
        else:
            end_detached(self._scheduler, request)
            self._table.record([self._table.finish(request)])
