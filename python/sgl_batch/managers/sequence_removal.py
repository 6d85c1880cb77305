"""Owns the removal of sequences before their end: aborts, and the retraction of all sequences that have KV.

The caller selects the sequences. SGLang itself aborts requests in the running batch.
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
    """Sequences in no batch, without KV of their own: `queued` ones, and choices whose prompt a leader computes.

    `followers`: choices that wait for their leader's prompt, by prompt group. `forked`: choices that can compute the
    last token of it. `begun`: the request whose prompt decode steps have computed in part; it is in a batch only while
    they compute more of it.
    """

    queued: SequenceQueue
    followers: dict[str, list[Request]] = field(default_factory=dict)
    forked: list[Request] = field(default_factory=list)
    begun: Request | None = None

    @property
    def num_choices(self) -> int:
        """The number of choices, each of which will take a request slot."""
        return sum(map(len, self.followers.values())) + len(self.forked)


class JoinArrived(Protocol):
    """Combines sequences whose KV has arrived on the device into the decode batch."""

    def __call__(self, running: ScheduleBatch, *, wait: bool) -> ScheduleBatch:
        """Return the decode batch with them. `wait`: whether to wait for all KV on its way."""


class SequenceRemoval:
    """Removes sequences from `table`, `unbatched` and `kv` together."""

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
        """Drop queued sequences whose requests SGLang has removed from its queue (aborted, or timed out)."""
        queue, queued = self._scheduler.waiting_queue, self._unbatched.queued
        if len(queue) == len(queued):
            return
        present = {request.rid for request in queue}
        for sequence in [s for s in queued if s.sequence_id not in present]:
            queued.remove(sequence.sequence_id)
            self._table.abort_queued(sequence)

    def leave_queue(self, name: str) -> None:
        """Take a queued sequence out of the queue. It keeps its place in the table."""
        queue = self._scheduler.waiting_queue
        queue[:] = [request for request in queue if request.rid != name]
        self._unbatched.queued.remove(name)

    def abort_outside_batches(self, is_meant: Callable[[str], bool]) -> None:
        """Abort the sequences outside the running batch that hold or await KV and for which `is_meant(id)` is true.

        READY ones end now: otherwise they would keep their pages, and owe their answer, until the decode group has room
        for them. Those whose KV is on its way, and choices that wait for their prompt, end with the next step that
        computes them.
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
        """End a sequence with this error, unless it is ending already. A running one ends with its next step.

        A QUEUED sequence must be new, and not in the queue yet.
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
        """End a waiting request as aborted, with the tokens that it has generated."""
        end = end_aborted if request.req_pool_idx is not None else end_detached
        end(self._scheduler, request)
        self._table.record([self._table.finish(request)])
        self._kv.forget(request.rid)

    def abort_retracted(self, is_meant: Callable[[str], bool]) -> None:
        """Abort retracted requests, answered with their generated tokens; SGLang would answer queued ones without."""
        queue = self._scheduler.waiting_queue
        ended = [request for request in queue if request.output_ids and is_meant(request.rid)]
        for request in ended:
            queue.remove(request)
            end_detached(self._scheduler, request)
        self.forget_removed()

    def retract_all(self, running: ScheduleBatch) -> None:
        """Drop the KV of every sequence that has any, and queue it again, by arrival, to compute its KV anew."""
        self.forget_removed()
        queue = self._scheduler.waiting_queue
        for request in self._take_out(running):
            self._give_up_kv(request)
            if request.rid in self._table:
                queue.append(request)
        queue.sort(key=lambda request: self._table[request.rid].arrival)
        self._unbatched.queued.replace(self._table[request.rid] for request in queue)

    def _take_out(self, running: ScheduleBatch) -> list[Request]:
        """Return all requests that have KV or share it, and leave the decode batch empty."""
        joined = self._join_arrived(running, wait=True)
        forked, self._unbatched.forked = self._unbatched.forked, []
        ready = [self._table.request_named(sequence.sequence_id) for sequence in self._table.ready]
        begun, self._unbatched.begun = self._unbatched.begun, None
        partly = [] if begun is None else [begun]
        found = [*(request for request in joined.reqs if not request.finished()), *ready, *forked, *partly]
        clear_batch(joined)
        clear_batch(running)  # where `running` was empty, `joined` is another batch
        return found

    def _give_up_kv(self, request: Request) -> None:
        """Drop the KV of a request, and end the request now if it is to be aborted. A replica leaves with its KV."""
        self._kv.give_up(request)
        if self._table.is_replica(request.rid):
            self._table.drop_replica(request.rid)
        elif request.to_finish is None:
            self._table.retracted(request)
        else:
            end_detached(self._scheduler, request)
            self._table.record([self._table.finish(request)])
