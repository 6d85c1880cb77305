"""Owns the sequences of a rank, and carries out what core/ decides over them: prefill, refill, decode, finish.

It decides nothing itself, and runs no forward pass; it hands batches to the scheduler, which does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_batch.core.admission import Admission, refusal, reserve
from sgl_batch.core.coroutine import Event, Transition, advance
from sgl_batch.core.order.fifo import FifoOrder
from sgl_batch.core.page_boundary import Idle, PrefillGroup, Refill, State, decide
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.plan import Plan
from sgl_batch.core.primitives import combine, migrate, yield_
from sgl_batch.core.rank_agreement import Movable
from sgl_batch.core.sequence import Sequence, Status
from sgl_batch.managers import prompt_groups
from sgl_batch.managers.prompt_sharing import PromptSharing
from sgl_batch.managers.sequence_queue import SequenceQueue, SequencesView
from sgl_batch.managers.trace import TraceWriter
from sgl_batch.model_executor.counters import Counters, PartClock
from sgl_batch.sglang_adapter.moving import movable
from sgl_batch.sglang_adapter.scheduling import decode_batches, end_aborted, mark_aborted, merge_into, prefill_batch


class BoundaryExecutor:
    """State of all sequences: their requests by id, the queue's order, the READY ones, and pages reserved."""

    def __init__(self, scheduler: Any, plan: Plan, counters: Counters, trace: TraceWriter) -> None:
        self._scheduler, self.plan, self._counters, self._trace = scheduler, plan, counters, trace
        allocator = scheduler.token_to_kv_pool_allocator
        self.ledger = PageLedger(allocator.size // plan.page_size, plan.page_size)
        self._sharing = PromptSharing(scheduler)
        self._order = FifoOrder()
        self._sequences: dict[str, Sequence] = {}
        self._requests: dict[str, Any] = {}
        self._queued = SequenceQueue()
        self._ready: dict[str, Sequence] = {}
        self._forks: dict[str, list[Any]] = {}
        self._forked: list[Any] = []
        self._arrivals = 0
        self._steps = 0
        self._filling = False
        self._changes = 0
        self._changes_at_boundary = -1

    # Intake.

    def enqueue(self, request: Any) -> None:
        """Take in a request that waits in the scheduler's queue; one that can never fit is marked with its error."""
        error = refusal(self._sequence_of(request), self.ledger)
        if error is not None and request.to_finish is None:
            request.set_finish_with_abort(error)
        sequence = self._sequence_of(request)
        assert sequence.sequence_id not in self._sequences, f"request id {sequence.sequence_id} is in use"
        self._sequences[sequence.sequence_id] = sequence
        self._queued.add(sequence)
        self._requests[sequence.sequence_id] = request
        self._arrivals += 1
        self._changes += 1

    def _sequence_of(self, request: Any) -> Sequence:
        tag = prompt_groups.decode(request.extra_key)
        refused = request.to_finish is not None
        prompt_tokens = len(request.origin_input_ids)
        wants_prompt_logprobs = request.return_logprob and 0 <= request.logprob_start_len < prompt_tokens
        shares = tag is not None and not wants_prompt_logprobs and not refused
        return Sequence(
            sequence_id=request.rid,
            arrival=self._arrivals,
            prompt_tokens=prompt_tokens,
            max_new_tokens=1 if refused else request.sampling_params.max_new_tokens,
            prompt_group=tag.group if tag is not None and shares else None,
            choice=tag.index if tag is not None else 0,
        )

    def forget_removed(self) -> None:
        """Drop queued sequences whose requests SGLang took out of the queue (aborted, or timed out)."""
        queue = self._scheduler.waiting_queue
        if len(queue) == len(self._queued):
            return
        present = {request.rid for request in queue}
        for sequence in [s for s in self._queued.view() if s.sequence_id not in present]:
            self._record([advance(sequence, Event.ABORT, "aborted in the queue")])
            self._counters.add("sequences_aborted")
            self._queued.remove(sequence.sequence_id)
            self._drop(sequence)

    def abort_outside_batches(self, is_meant: Callable[[str], bool]) -> None:
        """Abort the sequences in question that hold or await KV outside the running batch.

        READY ones end here: until the decode group has room for them, they would keep their pages and their answer.
        Choices that wait for their leader's prompt end with the next step, which is their prefill.
        """
        for name in [name for name in self._ready if is_meant(name)]:
            del self._ready[name]
            request = self._requests[name]
            end_aborted(self._scheduler, request)
            self._record([self._finish(request)])
        for request in [r for forks in self._forks.values() for r in forks] + self._forked:
            if is_meant(request.rid):
                mark_aborted(request)

    @property
    def is_empty(self) -> bool:
        return not self._sequences

    # Decide, then do.

    def next_batch(self, running: Any) -> tuple[Any | None, Any]:
        """The batch to run next and the decode batch after this decision."""
        if self.num_forked:
            return self.fork_batch(), running
        action = decide(self.state(running), self.plan, self.ledger, self._order)
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

    @property
    def clock(self) -> PartClock:
        """Where this rank's time goes."""
        return self._counters.clock

    def queued_named(self, names: list[str]) -> list[Sequence]:
        """Queued sequences by id."""
        return [self._queued[name] for name in names]

    def ready_named(self, names: list[str]) -> tuple[Sequence, ...]:
        """READY sequences by id; those that were to come and did not are left out."""
        return tuple(self._ready[name] for name in names if name in self._ready)

    # What comes from other ranks and goes there.

    def request_named(self, name: str) -> Any:
        """The request of a sequence of this rank."""
        return self._requests[name]

    def is_running(self, name: str) -> bool:
        """Whether a sequence is in the decode batch."""
        return self._sequences[name].status is Status.RUNNING

    def movable(self, running: Any) -> tuple[list[Movable], list[Movable]]:
        """READY and RUNNING sequences that can change their rank: nobody shares their pages, all can be written."""
        ready = [self._movable(name) for name in self._ready]
        run = [self._movable(request.rid) for request in running.reqs]
        return [item for item in ready if item is not None], [item for item in run if item is not None]

    def _movable(self, name: str) -> Movable | None:
        sequence, request = self._sequences[name], self._requests[name]
        if sequence.prompt_group is not None or not movable(request):
            return None
        return Movable(sequence=sequence, tokens=request.kv_committed_len, pages=self.ledger.whole_pages(sequence))

    def expect(self, request: Any) -> str | None:
        """Keep pages for a sequence that may come; why not, with the numbers, where there is no room."""
        need, free = self.ledger.whole_pages(self._sequence_of(request)), self.ledger.free_pages
        if need > free:
            return f"it can need {need} pages and {free} are free"
        self.ledger.reserve(request.rid, need)
        return None

    def expect_no_more(self, name: str) -> None:
        """The sequence that was expected does not come."""
        self.ledger.release(name)

    def adopt(self, request: Any) -> None:
        """A sequence has come, with its KV: it is READY here."""
        sequence = self._sequence_of(request)
        sequence.status = Status.MIGRATING
        self._arrivals += 1
        self._sequences[request.rid], self._requests[request.rid] = sequence, request
        self._ready[request.rid] = sequence
        self._record([migrate(sequence, Event.ARRIVE, "moved here to even out the ranks")])
        self._counters.add("sequences_arrived")

    def depart(self, name: str) -> None:
        """A sequence has gone to another rank."""
        sequence = self._sequences[name]
        self._record([migrate(sequence, Event.DEPART, "moved away to even out the ranks")])
        self._counters.add("sequences_departed")
        self._ready.pop(name, None)
        self._drop(sequence)

    @property
    def num_forked(self) -> int:
        """Choices whose prompt has just been computed by their leader."""
        return len(self._forked)

    def fork_batch(self) -> Any:
        """The prefill of forked choices: their prompts' last tokens."""
        limit = self.plan.prefill.b_moe
        taken, self._forked = self._forked[:limit], self._forked[limit:]
        return self._prefill(taken, "its prompt was computed by its leader")

    def prefill(self, action: PrefillGroup) -> Any:
        """The batch of a prefill group; from now on prefill goes on until enough are ready."""
        self._filling = True
        return self._prefill_units(action.units)

    def begin_page(self) -> None:
        """A boundary is past: count steps from here."""
        self._counters.add("boundaries")
        self._filling = False
        self._steps = 0
        self._changes_at_boundary = self._changes

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

    def state(self, running: Any) -> State:
        """What decisions are made from: views, so that a step between boundaries costs the same under any queue."""
        pool = self._scheduler.req_to_token_pool
        promised = sum(len(forks) for forks in self._forks.values()) + len(self._forked)
        return State(
            queued=self._queued.view(without=self._groups_awaiting_grammar()),
            ready=SequencesView(self._ready),
            running=len(running.reqs),
            steps=self._steps,
            slots=pool.size,
            free_slots=pool.available_size() - promised,
            filling=self._filling,
            changed=self._changes != self._changes_at_boundary,
        )

    def _groups_awaiting_grammar(self) -> set[str]:
        """Prompts of which some choice still waits for its grammar: the others wait for it, to share the prompt."""
        tags = (prompt_groups.decode(r.extra_key) for r in self._scheduler.grammar_manager.grammar_queue)
        return {tag.group for tag in tags if tag is not None}

    def _prefill_units(self, units: tuple[Admission, ...]) -> Any:
        for unit in units:
            reserve(unit, self.ledger)
            if unit.followers:
                group = unit.leader.prompt_group or ""
                self._forks[group] = [self._requests[s.sequence_id] for s in unit.followers]
        taken = {member.sequence_id for unit in units for member in unit.members}
        queue = self._scheduler.waiting_queue
        queue[:] = [request for request in queue if request.rid not in taken]
        for name in taken:
            self._queued.remove(name)
        leaders = [self._requests[unit.leader.sequence_id] for unit in units]
        return self._prefill(leaders, f"prefill group of {len(leaders)}")

    def _prefill(self, requests: list[Any], why: str) -> Any:
        sequences = [self._sequences[request.rid] for request in requests]
        self._record(combine(sequences, Event.COMBINE_PREFILL, why))
        return prefill_batch(self._scheduler, requests)

    def refill(self, sequences: tuple[Sequence, ...], running: Any) -> Any:
        """The decode batch with these READY sequences combined into it."""
        self._record(combine(sequences, Event.COMBINE_DECODE, f"refill at a boundary after {self._steps} steps"))
        requests = [self._requests[sequence.sequence_id] for sequence in sequences]
        for sequence in sequences:
            del self._ready[sequence.sequence_id]
        with self._counters.clock.part("copies"):
            for joining in decode_batches(self._scheduler, requests):
                running = merge_into(running, joining)
            return running

    # After a forward pass.

    def before_prefill_results(self, batch: Any) -> None:
        """Fork the choices of leaders in this batch, while the leaders still hold all their pages."""
        for request in batch.reqs:
            sequence = self._sequences[request.rid]
            group = sequence.prompt_group
            if group is not None and sequence.is_leader and group in self._forks:
                followers = self._forks.pop(group)
                with self._counters.clock.part("copies"):
                    self._sharing.fork(group, request, followers)
                self._counters.add("prompts_shared", len(followers))
                self._forked.extend(followers)

    def after_results(self, batch: Any) -> None:
        """Yield what was prefilled, and let go of what has finished."""
        changes: list[Transition] = []
        prefilled = batch.forward_mode.is_extend()
        self._counters.add("output_tokens", len(batch.reqs))
        if prefilled:
            self._counters.add("prompt_tokens", batch.extend_num_tokens)
        for request in batch.reqs:
            if not request.finished():
                if prefilled:
                    sequence = self._sequences[request.rid]
                    changes.append(yield_(sequence, finished=False, why="its KV is kept for decode"))
                    self._ready[request.rid] = sequence
            elif request.rid in self._sequences:
                changes.append(self._finish(request))
        self._record(changes)

    def _finish(self, request: Any) -> Transition:
        sequence = self._sequences[request.rid]
        sequence.generated_tokens = len(request.output_ids)
        reason = request.finished_reason.to_json()
        aborted = reason.get("type") == "abort"
        change = advance(sequence, Event.ABORT if aborted else Event.FINISH, f"finish reason: {reason['type']}")
        self._counters.add("sequences_aborted" if aborted else "sequences_finished")
        self._counters.add("generated_tokens", sequence.generated_tokens)
        self._drop(sequence)
        return change

    def _drop(self, sequence: Sequence) -> None:
        del self._sequences[sequence.sequence_id], self._requests[sequence.sequence_id]
        if self.ledger.holds(sequence.sequence_id):
            self.ledger.release(sequence.sequence_id)
        group = sequence.prompt_group
        if group is not None and self._sharing.leave(group, sequence.sequence_id):
            self.ledger.release(group)

    def _record(self, changes: list[Transition]) -> None:
        self._changes += len(changes)
        self._trace.write(changes)
