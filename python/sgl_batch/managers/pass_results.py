"""Owns what happens to sequences when a forward pass has ended: they yield, finish, and give back what they held.

SGLang processes the results of a pass itself, between `before_prefill` and `process`.
"""

from __future__ import annotations

from sgl_batch.core.coroutine import Event, Transition
from sgl_batch.kv_offload.kv_form import KVForm
from sgl_batch.managers.interval_clock import IntervalClock
from sgl_batch.managers.prefill_batches import PrefillBatches
from sgl_batch.managers.sequence_removal import Unbatched
from sgl_batch.managers.sequence_table import SequenceTable
from sgl_batch.metrics.counters import Counters
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch
from sgl_batch.sglang_adapter.types.requests import Request


class PassResults:
    """Brings `table`, `unbatched` and `kv` up to date with the results of forward passes."""

    def __init__(
        self,
        table: SequenceTable,
        unbatched: Unbatched,
        kv: KVForm,
        prompts: PrefillBatches,
        interval: IntervalClock,
        counters: Counters,
    ) -> None:
        self._table, self._unbatched, self._kv = table, unbatched, kv
        self._prompts, self._interval, self._counters = prompts, interval, counters

    def before_prefill(self, batch: ScheduleBatch) -> None:
        """Complete a prefill batch that has been computed, before SGLang processes its results.

        Its copies to the store are completed, and the choices of its leaders fork while the leaders hold their pages.

        Args:
            batch: a prefill batch whose forward pass has ended.
        """
        self._kv.end_pass(batch)
        self._prompts.fork_choices(batch)

    def process(self, batch: ScheduleBatch, requests: list[Request]) -> None:
        """Let the sequences of a batch yield or finish, after SGLang has processed its results.

        Prefilled sequences become READY. Finished ones leave the table and give back their pages. The KV of the others
        goes where the form of KV wants it.

        Args:
            batch: the batch of the pass.
            requests: the requests of `batch` that have a result of it. Others ended while the pass was under way.
        """
        prefilled = batch.forward_mode.is_extend()
        replicas = self._table.num_replicas and sum(self._table.is_replica(one.rid) for one in requests)
        if prefilled:
            if not replicas:  # the owner of a replica counts its prompt
                self._prompts.count_results(batch, requests)
        else:
            self._kv.end_pass(batch)
            self._interval.end_step()
            self._counters.add("output_tokens", len(requests) - replicas)
        self._table.record(self._changes_of(requests, prefilled=prefilled))
        for request in requests:
            if request.rid not in self._table:
                self._kv.forget(request.rid)
        owned = (request for request in requests if not self._table.is_replica(request.rid))
        self._kv.settle(batch, [request for request in owned if not request.finished()])
        if prefilled:
            self._prompts.keep_begun()

    def begin_verified_step(self, num_rows: int) -> None:
        """Begin a step of so many rows whose tokens an earlier pass has sampled; `process` ends it."""
        self._interval.begin_step(num_rows)

    def _changes_of(self, requests: list[Request], *, prefilled: bool) -> list[Transition]:
        changes = []
        for request in requests:
            if not request.finished():
                if prefilled and request is not self._unbatched.begun:
                    changes.append(self._table.prefilled(request.rid))
            elif self._table.is_replica(request.rid):
                changes.append(self._table.finish(request))
            elif request.rid in self._table:
                self._unbatched.queued.order.finished(self._table[request.rid], len(request.output_ids))
                sequence = self._table[request.rid]
                changes.append(self._table.finish(request))
                if changes[-1].event is Event.FINISH:
                    self._kv.admission.policy.finished(sequence, sequence.generated_tokens)
        return changes
