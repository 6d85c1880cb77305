"""Owns what core/ decided over a rank's sequences, carried out: prefill, refill, decode, and what follows a pass.

It decides nothing itself, and runs no forward pass; it hands batches to the scheduler, which does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sgl_batch.core.admission import Admission, group_by_prompt, reserve
from sgl_batch.core.coroutine import Event, Transition
from sgl_batch.core.exclusive import Rooms
from sgl_batch.core.order.fifo import FifoOrder
from sgl_batch.core.page_boundary import Idle, PrefillGroup, Refill, State, boundary_due, decide, prefill_wanted
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.plan import Plan
from sgl_batch.core.primitives import combine
from sgl_batch.core.rank_agreement import Movable
from sgl_batch.core.recomputation import prefilled
from sgl_batch.core.sequence import Sequence
from sgl_batch.managers import prompt_groups
from sgl_batch.managers.prompt_sharing import PromptSharing
from sgl_batch.managers.sequence_queue import SequenceQueue
from sgl_batch.managers.sequence_table import SequenceTable
from sgl_batch.managers.trace import TraceWriter
from sgl_batch.model_executor.counters import Counters, PartClock
from sgl_batch.sglang_adapter.scheduling import (
    decode_batches,
    empty,
    end_aborted,
    end_detached,
    end_retraction,
    mark_aborted,
    merge_into,
    prefill_batch,
    retract,
)


class BoundaryExecutor:
    """The queue's order, choices that wait for their leader's prompt, and where the rank stands between boundaries.

    `table` has the sequences themselves. `paused`: no step is begun; what comes is queued.
    """

    def __init__(self, scheduler: Any, plan: Plan, counters: Counters, trace: TraceWriter) -> None:
        self._scheduler, self.plan, self._counters = scheduler, plan, counters
        self._sharing = PromptSharing(scheduler, counters, self._free_places)
        self.table = self._make_table(trace)
        self._order = FifoOrder()
        self._queued = SequenceQueue()
        self._forks: dict[str, list[Any]] = {}
        self._forked: list[Any] = []
        self._steps = 0
        self._filling = False
        self._changes_at_boundary = -1
        self.paused = False

    def _make_table(self, trace: TraceWriter) -> SequenceTable:
        return SequenceTable(self._device_ledger(), self._sharing, self._counters, trace)

    def _device_ledger(self) -> PageLedger:
        size = self.plan.page_size
        return PageLedger(self._scheduler.token_to_kv_pool_allocator.size // size, size)

    def _free_places(self, pages: list[int]) -> None:
        """Nobody holds these pages of prompts any more."""
        slots = torch.tensor(pages, device=self._scheduler.device) * self.plan.page_size
        self._scheduler.token_to_kv_pool_allocator.free(slots)

    # Intake.

    def enqueue(self, request: Any) -> None:
        """Take in a request that waits in the scheduler's queue; one that can never fit is marked with its error."""
        self._queued.add(self.table.enter(request))

    def forget_removed(self) -> None:
        """Drop queued sequences whose requests SGLang took out of the queue (aborted, or timed out)."""
        queue = self._scheduler.waiting_queue
        if len(queue) == len(self._queued):
            return
        present = {request.rid for request in queue}
        for sequence in [s for s in self._queued.view() if s.sequence_id not in present]:
            self._queued.remove(sequence.sequence_id)
            self.table.abort_queued(sequence)

    def abort_outside_batches(self, is_meant: Callable[[str], bool]) -> None:
        """Abort the sequences in question that hold or await KV outside the running batch.

        READY ones end here: until the decode group has room for them, they would keep their pages and their answer.
        Choices that wait for their leader's prompt end with the next step, which is their prefill.
        """
        for name in [s.sequence_id for s in self.table.ready if is_meant(s.sequence_id)]:
            request = self.table.take_ready(name)
            end_aborted(self._scheduler, request)
            self.table.record([self.table.finish(request)])
        for request in [r for forks in self._forks.values() for r in forks] + self._forked:
            if is_meant(request.rid):
                mark_aborted(request)

    def abort_retracted(self, is_meant: Callable[[str], bool]) -> None:
        """Answer retracted sequences in question with what they had generated, which SGLang does not of queued ones."""
        queue = self._scheduler.waiting_queue
        ended = [request for request in queue if request.output_ids and is_meant(request.rid)]
        for request in ended:
            queue.remove(request)
            end_detached(self._scheduler, request)
        self.forget_removed()

    # Between two steps.

    def retract_all(self, running: Any) -> None:
        """Every sequence that has KV loses it, and is queued again in its old place, to compute it anew."""
        self.forget_removed()
        queue = self._scheduler.waiting_queue
        for request in self._take_out(running):
            self._give_up_kv(request)
            if request.rid in self.table:
                queue.append(request)
        queue.sort(key=lambda request: self.table[request.rid].arrival)
        self._queued = SequenceQueue()
        for request in queue:
            self._queued.add(self.table[request.rid])

    def _take_out(self, running: Any) -> list[Any]:
        """All requests that have KV, or have found it; the decode batch is empty then."""
        forked, self._forked = self._forked, []
        ready = [self.table.request_named(sequence.sequence_id) for sequence in self.table.ready]
        found = [*(request for request in running.reqs if not request.finished()), *ready, *forked]
        empty(running)
        return found

    def _give_up_kv(self, request: Any) -> None:
        """One that is to be aborted needs no other step for that."""
        retract(self._scheduler, request)
        if request.to_finish is None:
            self.table.retracted(request)
        else:
            end_detached(self._scheduler, request)
            self.table.record([self.table.finish(request)])

    def unlist_prompts(self) -> None:
        """The KV of prompts that is there now is of other weights than that of prompts to come."""
        self._sharing.unlist()

    @property
    def has_kv(self) -> bool:
        """Whether any sequence has KV: those in the queue have none."""
        return self.table.num_sequences > len(self._queued)

    # Decide, then do.

    def next_batch(self, running: Any) -> tuple[Any | None, Any]:
        """The batch to run next and the decode batch after this decision."""
        if self.num_forked:
            return self.fork_batch(), running
        state = self.state(running)
        if boundary_due(state, self.plan) and prefill_wanted(state, self.plan):
            self.foresee(state)
        action = decide(state, self.plan, self.ledger, self._order)
        if isinstance(action, Idle):
            self._filling = False
            return None, running
        if isinstance(action, PrefillGroup):
            return self.prefill(action), running
        if isinstance(action, Refill):
            running = self.refill(action.sequences, running)
        if isinstance(action, Refill) or action.at_boundary:
            self.begin_page()
        return self.decode_step(running), running

    # What decisions are made from.

    def foresee(self, state: State) -> None:
        """Note of the first queued sequences what their prompts share, from which groups are made."""
        units = group_by_prompt(state.queued, self._order, most_members=state.slots)
        leaders = (unit.leader for unit in units)
        self._sharing.foresee(((s, self.table.request_named(s.sequence_id)) for s in leaders), self.plan)

    @property
    def is_empty(self) -> bool:
        return self.table.is_empty

    @property
    def ledger(self) -> PageLedger:
        """The account of pages."""
        return self.table.ledger

    def store_state(self) -> dict[str, int]:
        """What the host KV store has; nothing where there is none."""
        return {}

    def rooms(self, running: Any) -> Rooms | None:
        """What each tier has for prompts, where a page lies in one of them alone."""
        return None

    @property
    def admission_ledger(self) -> PageLedger:
        """The account in which a sequence's pages are reserved when it is admitted."""
        return self.table.ledger

    def sync(self) -> None:
        """Nobody runs and nobody waits: complete what goes on in the background."""

    @property
    def clock(self) -> PartClock:
        """Where this rank's time goes."""
        return self._counters.clock

    def state(self, running: Any) -> State:
        """Views, so that a step between boundaries costs the same under any queue."""
        pool = self._scheduler.req_to_token_pool
        promised = sum(len(forks) for forks in self._forks.values()) + len(self._forked)
        return State(
            queued=self._queued.view(without=self._groups_awaiting_grammar()),
            ready=self.table.ready,
            running=len(running.reqs),
            steps=self._steps,
            slots=pool.size,
            free_slots=pool.available_size() - promised,
            filling=self._filling,
            changed=self.table.changes != self._changes_at_boundary,
        )

    def _groups_awaiting_grammar(self) -> set[str]:
        """Prompts of which some choice still waits for its grammar: the others wait for it, to share the prompt."""
        tags = (prompt_groups.decode(r.extra_key) for r in self._scheduler.grammar_manager.grammar_queue)
        return {tag.group for tag in tags if tag is not None}

    def queued_named(self, names: list[str]) -> list[Sequence]:
        """Queued sequences by id."""
        return [self._queued[name] for name in names]

    def ready_named(self, names: list[str]) -> tuple[Sequence, ...]:
        """READY sequences by id; those that were to come and did not are left out."""
        return self.table.ready_named(names)

    def movable(self, running: Any) -> tuple[list[Movable], list[Movable]]:
        """READY and RUNNING sequences that can change their rank."""
        return self.table.movable(running)

    @property
    def num_forked(self) -> int:
        """Choices whose prompt has just been computed by their leader."""
        return len(self._forked)

    # Steps of which the results of the one before are not known.

    @property
    def overlaps(self) -> bool:
        """Whether the next decode step can begin before the results of the last one are processed."""
        return True

    def goes_on(self, running: Any) -> bool:
        """Whether a step of this decode batch comes next, whatever the results under way are: no boundary is due.

        A page of steps counts those that a sequence computes behind its end, so that its pages are enough for these.
        """
        return bool(running.reqs) and not self.num_forked and not boundary_due(self.state(running), self.plan)

    # What was decided.

    def fork_batch(self) -> Any:
        """The prefill of forked choices: their prompts' last tokens."""
        limit = self.plan.prefill.b_moe
        taken, self._forked = self._forked[:limit], self._forked[limit:]
        return self._prefill(taken, "its prompt was computed by its leader")

    def prefill(self, action: PrefillGroup) -> Any:
        """The batch of a prefill group; from now on prefill goes on until enough are ready."""
        self._filling = True
        return self._prefill_units(action.units)

    def _prefill_units(self, units: tuple[Admission, ...]) -> Any:
        for unit in units:
            self._admit(unit)
            if unit.followers:
                group = unit.leader.prompt_group or ""
                self._forks[group] = [self.table.request_named(s.sequence_id) for s in unit.followers]
        taken = {member.sequence_id for unit in units for member in unit.members}
        queue = self._scheduler.waiting_queue
        queue[:] = [request for request in queue if request.rid not in taken]
        for name in taken:
            self._queued.remove(name)
        leaders = [self.table.request_named(unit.leader.sequence_id) for unit in units]
        return self._prefill_group(leaders, f"prefill group of {len(leaders)}")

    def _admit(self, unit: Admission) -> None:
        """Keep all pages that a unit can need, beside those that it shares with who was admitted before."""
        hold = self._sharing.claim(unit, self.table.request_named(unit.leader.sequence_id), self.plan)
        reserve(unit, self.admission_ledger, held=len(hold.pages), new=len(hold.own))

    def _prefill_group(self, requests: list[Any], why: str) -> Any:
        batch = self._prefill(requests, why)
        self._sharing.settle(requests)
        return batch

    def _prefill(self, requests: list[Any], why: str) -> Any:
        sequences = [self.table[request.rid] for request in requests]
        self.table.record(combine(sequences, Event.COMBINE_PREFILL, why))
        batch = prefill_batch(self._scheduler, requests)
        self._count_recomputed(sequences, batch)
        return batch

    def _count_recomputed(self, sequences: list[Sequence], batch: Any) -> None:
        for sequence, start, length in zip(sequences, batch.prefix_lens, batch.extend_lens, strict=True):
            again = prefilled(sequence, start, start + length)
            self._counters.add("recomputed_tokens_planned", again.planned)
            self._counters.add("recomputed_tokens_unplanned", again.unplanned)

    def refill(self, sequences: tuple[Sequence, ...], running: Any) -> Any:
        """The decode batch with these READY sequences combined into it."""
        self.table.record(combine(sequences, Event.COMBINE_DECODE, f"refill at a boundary after {self._steps} steps"))
        requests = [self.table.take_ready(sequence.sequence_id) for sequence in sequences]
        with self._counters.clock.part("copies"):
            for joining in decode_batches(self._scheduler, requests):
                running = merge_into(running, joining)
            return running

    def begin_page(self) -> None:
        """A boundary is past: count steps from here."""
        self._counters.add("boundaries")
        self._filling = False
        self._steps = 0
        self._changes_at_boundary = self.table.changes

    def decode_step(self, running: Any) -> Any:
        """The decode batch, made ready for its next step."""
        running.prepare_for_decode()
        self.count_step()
        return running

    def count_step(self) -> None:
        """A decode step was decided, whether or not this rank has rows in it."""
        self._filling = False
        self._steps += 1
        self._counters.add("decode_steps")

    # After a forward pass.

    def before_prefill_results(self, batch: Any) -> None:
        """Fork the choices of leaders in this batch, while the leaders still hold all their pages."""
        for request in batch.reqs:
            sequence = self.table[request.rid]
            group = sequence.prompt_group
            if group is not None and sequence.is_leader and group in self._forks:
                followers = self._forks.pop(group)
                with self._counters.clock.part("copies"):
                    self._fork(request, followers)
                self._counters.add("prompts_shared", len(followers))

    def _fork(self, leader: Any, followers: list[Any]) -> None:
        self._sharing.fork(leader, followers)
        self._forked.extend(followers)

    def after_results(self, batch: Any, requests: list[Any]) -> None:
        """Yield what was prefilled, and let go of what has finished.

        `requests`: those of the batch that have a result of it; others ended while it was under way.
        """
        changes: list[Transition] = []
        prefilled = batch.forward_mode.is_extend()
        again, rows_again = end_retraction(batch) if prefilled else (0, 0)
        self._counters.add("output_tokens", len(requests) - again)
        if prefilled:
            self._counters.add("prompt_tokens", batch.extend_num_tokens - rows_again)
        for request in requests:
            if not request.finished():
                if prefilled:
                    changes.append(self.table.prefilled(request.rid))
            elif request.rid in self.table:
                changes.append(self.table.finish(request))
        self.table.record(changes)
