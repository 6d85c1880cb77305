"""Owns what core/ decided over a rank's sequences, carried out: actions, batches, and what follows a forward pass.

It decides nothing itself, and runs no forward pass; it hands batches to the scheduler, which does. Where KV lies, and
how it moves, is the affair of a `KVForm`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from sgl_batch.core import decide
from sgl_batch.core.actions import (
    Abort,
    Action,
    Actions,
    BeginInterval,
    Evict,
    Extend,
    Idle,
    Join,
    Migrate,
    Partition,
    Prefill,
    PrefillChoices,
    Refill,
    Restore,
    Step,
    StreamDecode,
    Suspend,
    SwitchPhase,
    Sync,
)
from sgl_batch.core.admission import Admission
from sgl_batch.core.coroutine import Event, Transition
from sgl_batch.core.decision_record import Observed
from sgl_batch.core.exclusive import TierCapacity
from sgl_batch.core.kv_policy import KVPolicy
from sgl_batch.core.kv_state import Interval, KVState
from sgl_batch.core.order.interface import Budgets, OrderPolicy
from sgl_batch.core.page_boundary import State
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.plan import Plan
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.core.primitives import combine
from sgl_batch.core.rank_agreement import Movable
from sgl_batch.core.sequence import SequenceState
from sgl_batch.core.sequence_queue import SequenceQueue
from sgl_batch.kv_offload.kv_form import KVForm
from sgl_batch.managers.interval_clock import IntervalClock
from sgl_batch.managers.prefill_batches import PrefillBatches
from sgl_batch.managers.rank_view import CurrentRankView
from sgl_batch.managers.sequence_removal import SequenceRemoval, Unbatched
from sgl_batch.managers.sequence_table import SequenceTable
from sgl_batch.managers.trace import TraceWriter
from sgl_batch.metrics.counters import Counters, PartClock
from sgl_batch.requests import prompt_groups
from sgl_batch.sglang_adapter.moving import remove_from_batch
from sgl_batch.sglang_adapter.scheduling import (
    decode_batches,
    merge_into,
)
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch
from sgl_batch.sglang_adapter.types.requests import Request
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler

A = TypeVar("A", bound=Action)


class BoundaryExecutor:
    """The queue's order, choices that wait for their leader's prompt, and where the rank stands between boundaries.

    `table` has the sequences themselves, `kv` their KV. `beside`: a prefill batch that goes through the forward pass of
    the decode batch that was just given out. `paused`: no step is begun; what comes is queued.
    """

    def __init__(
        self,
        scheduler: SGLangScheduler,
        in_force: PlanInForce,
        counters: Counters,
        trace: TraceWriter,
        kv: KVForm,
        policy: KVPolicy,
        order: OrderPolicy | None = None,
        rank: int = 0,
    ) -> None:
        self._scheduler, self._in_force, self._counters = scheduler, in_force, counters
        self.kv, self._policy = kv, policy
        store = None if kv.admission is kv.device else kv.admission
        self._trace = trace
        self.table = SequenceTable(
            kv.device,
            kv.sharing,
            counters,
            trace,
            store_ledger=store,
            most_prompt_tokens=in_force.most_prompt_tokens,
            rank=rank,
        )
        self._unbatched = Unbatched(queued=SequenceQueue(order))
        self._prompts = PrefillBatches(scheduler, in_force, self.table, self._unbatched, kv, counters)
        self.removal = SequenceRemoval(scheduler, self.table, self._unbatched, kv, self.join_arrived)
        self._steps = 0
        self._filling = False
        self._changes_at_boundary = -1
        self._interval = IntervalClock()
        self._boundaries = 0
        self._urgent = False
        self.beside: ScheduleBatch | None = None
        self.paused = False

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._in_force.plan

    # Intake.

    def enqueue(self, request: Request) -> None:
        """Take in a request that waits in the scheduler's queue; one that can never fit ends with its error."""
        sequence = self.table.enter(request)
        for action in self.table.decided_on_arrival(sequence):
            self._do(action, self._scheduler.running_batch, 0.0)
        self._unbatched.queued.add(sequence)

    def unlist_prompts(self) -> None:
        """The KV of prompts that is there now is of other weights than that of prompts to come."""
        self.kv.sharing.invalidate()

    @property
    def has_kv(self) -> bool:
        """Whether any sequence has KV: those in the queue have none."""
        return self.table.num_sequences > len(self._unbatched.queued)

    # Decide, then do.

    def next_batch(self, running: ScheduleBatch) -> tuple[ScheduleBatch | None, ScheduleBatch]:
        """The batch to run next and the decode batch after this decision."""
        began = time.perf_counter()
        while True:
            for action in self._decide(running):
                match action:
                    case Step():
                        return self.step(action, running), running
                    case Prefill():
                        return self.prefill(action), running
                    case PrefillChoices(most=most):
                        return self.prefill_choices(most), running
                    case Idle():
                        self._filling = False
                        return None, running
                    case _:
                        running = self._do(action, running, began)

    def cross_boundary(self, running: ScheduleBatch, *, others_run: bool) -> ScheduleBatch:
        """Do what a rank decides for itself at a boundary at which none of several prefills; the decode batch then."""
        began, boundaries = time.perf_counter(), self._boundaries
        while self._boundaries == boundaries and not self._unbatched.forked:
            for action in self._decide_boundary(running, others_run=others_run):
                running = self._do(BeginInterval() if isinstance(action, Idle) else action, running, began)
        return running

    def composed_step(self, running: ScheduleBatch) -> ScheduleBatch | None:
        """This rank's batch in a decode step of several ranks, None where it has no rows; see `step`."""
        if not self.plan.mix_prefill:
            return self.step(Step(), running)
        (action,) = self._recorded(
            running, lambda state, kv: (decide.compose(state, kv, self.plan, self._policy),), decision="step"
        )
        return self.step(action, running)

    def _decide(self, running: ScheduleBatch) -> Actions:
        plan, policy = self.plan, self._policy
        return self._recorded(running, lambda state, kv: decide.decide(state, kv, plan, policy))

    def _decide_boundary(self, running: ScheduleBatch, *, others_run: bool) -> Actions:
        def make(state: State, kv: KVState) -> Actions:
            return self._policy.at_boundary(state, kv, self.plan, others_run=others_run)

        return self._recorded(running, make, decision="boundary", others_run=others_run)

    def _recorded(
        self,
        running: ScheduleBatch,
        make: Callable[[State, KVState], tuple[A, ...]],
        *,
        decision: str = "next",
        others_run: bool = False,
    ) -> tuple[A, ...]:
        """The decision that `make` comes to, written to the trace where there is one."""
        state, kv = self.state(running), self.kv_state(running)
        if not self._trace.is_open:
            return make(state, kv)
        observed = Observed(state, kv)
        actions = make(observed.state, observed.kv)
        self._trace.write_decision(
            observed.record(self.plan, self._policy.name, actions, decision=decision, others_run=others_run)
        )
        return actions

    def _do(self, action: Action, running: ScheduleBatch, boundary_began: float) -> ScheduleBatch:
        """Carry out an action that is not for the device; returns the decode batch."""
        match action:
            case Sync(wait=wait):
                self.kv.sync(wait=wait)
            case Join(wait=wait):
                running = self.join_arrived(running, wait=wait)
            case Suspend(sequences=sequences, why=why):
                self.suspend(sequences, running, why)
            case Evict(sequences=sequences):
                self.kv.to_store([self.table.request_named(s.sequence_id) for s in sequences])
                self._counters.add("evictions", len(sequences))
            case Extend(pages=pages):
                for sequence, number in pages:
                    self.ledger.resize(sequence.sequence_id, number)
            case Restore(pages=pages):
                for sequence, number in pages:
                    self.ledger.reserve(sequence.sequence_id, number)
                    self.kv.restore(self.table.take_ready(sequence.sequence_id))
            case Refill(sequences=sequences):
                running = self.refill(sequences, running)
            case StreamDecode(on=on):
                self.kv.stream(on=on)
            case BeginInterval():
                self.begin_interval(running, boundary_began)
            case Abort(sequences=sequences, why=why):
                for sequence in sequences:
                    self.removal.abort(sequence, why)
            case SwitchPhase() | Partition():
                raise AssertionError(f"{type(action).__name__} is not carried out yet")
            case Migrate():
                raise AssertionError("Migrate is carried out by all ranks together, in RankSteps")
            case _:
                raise AssertionError(f"{action} is for the device")
        return running

    # What decisions are made from.

    @property
    def is_empty(self) -> bool:
        return self.table.is_empty

    @property
    def ledger(self) -> PageLedger:
        """The account of pages."""
        return self.kv.device

    @property
    def admission_ledger(self) -> PageLedger:
        """The account in which a sequence's pages are reserved when it is admitted."""
        return self.kv.admission

    @property
    def clock(self) -> PartClock:
        """Where this rank's time goes."""
        return self._counters.clock

    @property
    def decides_alone(self) -> bool:
        """Whether this rank decides for itself what happens at a boundary at which none of several prefills."""
        return self._policy.is_local

    def store_state(self) -> dict[str, int]:
        """What the host KV store has; nothing where there is none."""
        if self.is_empty:  # a client that has all its answers finds all pages free
            self.sync()
        return self.kv.counts()

    def sync(self) -> None:
        """Nothing runs and nothing waits: complete what goes on in the background."""
        self.kv.sync(wait=True)

    def capacity(self, running: ScheduleBatch) -> TierCapacity | None:
        """What each tier has for prompts, where a page lies in one of them alone."""
        return self._policy.capacity(self.state(running), self.kv_state(running), self.plan)

    def estimate_shared(self, state: State) -> None:
        """Note of the first queued sequences what their prompts share, from which groups are made."""
        decide.estimate_shared(state, self.kv_state(None))

    def state(self, running: ScheduleBatch) -> State:
        """Views, so that a step between boundaries costs the same under any queue."""
        pool = self._scheduler.req_to_token_pool
        return State(
            queued=self._unbatched.queued.view(
                without=self._groups_awaiting_grammar(),
                budgets=Budgets(tokens=self.plan.prefill.b_moe, pages=self.admission_ledger.free_pages),
            ),
            ready=self.table.ready,
            running=len(running.reqs),
            steps=self._steps,
            request_slots=pool.size,
            free_request_slots=pool.available_size() - self._unbatched.num_choices,
            filling=self._filling,
            changed=self.table.changes != self._changes_at_boundary,
            returning=len(self.kv.returning),
            forked=len(self._unbatched.forked),
            queued_tokens=self._unbatched.queued.tokens,
            begun=self.begun,
            urgent=self._urgent,
        )

    def ask_boundary(self) -> None:
        """Have the boundary come before its time, with the next step; on several ranks for all of them."""
        self._urgent = True

    @property
    def begun(self) -> SequenceState | None:
        """The sequence of whose prompt decode steps have computed a part."""
        request = self._unbatched.begun
        return None if request is None else self.table[request.rid]

    @property
    def interval(self) -> Interval:
        """What was measured since the last boundary."""
        return self._interval.interval

    def kv_state(self, running: ScheduleBatch | None) -> KVState:
        """Where KV lies."""
        return self.kv.state(CurrentRankView(self.table, self.kv.sharing, self.plan, self.interval, running))

    def _groups_awaiting_grammar(self) -> set[str]:
        """Prompts of which some choice still waits for its grammar: the others wait for it, to share the prompt."""
        tags = (prompt_groups.decode(r.extra_key) for r in self._scheduler.grammar_manager.grammar_queue)
        return {tag.group for tag in tags if tag is not None}

    def queued_named(self, names: list[str]) -> list[SequenceState]:
        """Queued sequences by id."""
        return [self._unbatched.queued[name] for name in names]

    def ready_named(self, names: list[str]) -> tuple[SequenceState, ...]:
        """READY sequences by id; those that were to come and did not are left out."""
        return self.table.ready_named(names)

    def movable(self, running: ScheduleBatch) -> tuple[list[Movable], list[Movable]]:
        """READY and RUNNING sequences that can change their rank."""
        ready, run = self.table.movable(running)
        return self._policy.movable(ready, run, self.kv_state(running), self.plan)

    @property
    def num_forked(self) -> int:
        """Choices whose prompt has just been computed by their leader."""
        return len(self._unbatched.forked)

    # Steps of which the results of the one before are not known.

    @property
    def overlaps(self) -> bool:
        """Whether the next decode step can begin before the results of the last one are processed.

        A streamed step ends with its KV in the store, before the next one reads it.
        """
        return not self.kv_state(None).streams

    def decode_continues(self, running: ScheduleBatch) -> bool:
        """Whether a step of this decode batch comes next, whatever the results under way are: no boundary is due."""
        return decide.decode_continues(self.state(running), self.kv_state(running), self.plan)

    # What was decided.

    def prefill_choices(self, most: int) -> ScheduleBatch:
        """The batch that computes the last prompt tokens of choices whose leader has computed the rest."""
        return self._prompts.choices(most)

    def prefill(self, action: Prefill) -> ScheduleBatch:
        """The batch of a prefill group; from now on prefill goes on until enough are ready."""
        self._filling = True
        return self._prompts.group(action)

    def assign_tier(self, units: tuple[Admission, ...], running: ScheduleBatch) -> Prefill:
        """A prefill of these units, with where their KV is to lie."""
        return decide.prefill_of(units, self.state(running), self.kv_state(running), self.plan, self._policy)

    def refill(self, sequences: tuple[SequenceState, ...], running: ScheduleBatch) -> ScheduleBatch:
        """The decode batch with these waiting sequences combined into it."""
        requests = [self.table.take_ready(sequence.sequence_id) for sequence in sequences]
        self.kv.prepare_to_run(requests)
        return self._combine(requests, running, f"refill at a boundary after {self._steps} steps")

    def join_arrived(self, running: ScheduleBatch, *, wait: bool = False) -> ScheduleBatch:
        """The decode batch with the sequences whose KV has come to the device; with all on their way, if `wait`."""
        arrived = self.kv.arrived(wait=wait)
        for request in arrived.ready:
            self.table.take_ready(request.rid)
        self._unbatched.forked += arrived.choices
        requests = [*arrived.ready, *arrived.runners]
        if requests:
            running = self._combine(requests, running, "its KV is back on the device")
        if requests or arrived.choices:
            self._changes_at_boundary = self.table.changes
        return running

    def _combine(self, requests: list[Request], running: ScheduleBatch, why: str) -> ScheduleBatch:
        self.table.record(combine([self.table[request.rid] for request in requests], Event.COMBINE_DECODE, why))
        with self._counters.clock.part("copies"):
            for joining in decode_batches(self._scheduler, requests):
                running = merge_into(running, joining)
        return running

    def suspend(self, sequences: Sequence[SequenceState], running: ScheduleBatch, why: str) -> None:
        """Move these running sequences to the store, where they wait: all their KV is there when this returns."""
        requests = [self.table.request_named(sequence.sequence_id) for sequence in sequences]
        for request in requests:
            self.table.grown(request)
            remove_from_batch(running, request)
        self.kv.to_store(requests)
        self.table.record([self.table.suspended(request.rid, why) for request in requests])
        self._counters.add("suspensions", len(requests))

    def begin_interval(self, running: ScheduleBatch, boundary_began: float) -> None:
        """A boundary is past: count steps from here."""
        self._counters.add("boundaries")
        self._filling = self._urgent = False
        self._steps = 0
        self._boundaries += 1
        self._changes_at_boundary = self.table.changes
        alive = len(running.reqs) + len(self.kv.returning) + len(self.table.ready)
        self._interval.begin(alive, boundary_began=boundary_began)

    def step(self, action: Step, running: ScheduleBatch) -> ScheduleBatch | None:
        """The batch of a step, if this rank has rows. Chunks of prompts are `beside` it, or are the batch themselves.

        Whoever runs a decode batch takes what is `beside` it, and computes both in one forward pass.
        """
        assert action.decode is None, "all that runs is one decode batch"
        chunks = self._prompts.chunks(action) if action.prefill else None
        if not running.reqs:
            self.count_step()
            return chunks
        self.beside = chunks
        return self.decode_step(running)

    def decode_step(self, running: ScheduleBatch) -> ScheduleBatch:
        """The decode batch, made ready for its next step."""
        self._interval.begin_step(len(running.reqs))
        self.kv.step(running, self.plan)
        self.count_step()
        return running

    def count_step(self) -> None:
        """A decode step was decided, whether or not this rank has rows in it."""
        self._filling = False
        self._steps += 1
        self._counters.add("decode_steps")

    # After a forward pass.

    def before_prefill_results(self, batch: ScheduleBatch) -> None:
        """A prefill batch has been computed, whose results come next."""
        self.kv.end_pass(batch)
        self._prompts.fork_choices(batch)

    def after_results(self, batch: ScheduleBatch, requests: list[Request]) -> None:
        """Yield what was prefilled, and let go of what has finished.

        `requests`: those of the batch that have a result of it; others ended while it was under way.
        """
        prefilled = batch.forward_mode.is_extend()
        if prefilled:
            self._prompts.count_results(batch, requests)
        else:
            self.kv.end_pass(batch)
            self._interval.end_step()
            self._counters.add("output_tokens", len(requests))
        self.table.record(self._changes_of(requests, prefilled=prefilled))
        for request in requests:
            if request.rid not in self.table:
                self.kv.forget(request.rid)
        self.kv.settle(batch, [request for request in requests if not request.finished()])
        if prefilled:
            self._prompts.keep_begun()

    def _changes_of(self, requests: list[Request], *, prefilled: bool) -> list[Transition]:
        changes = []
        for request in requests:
            if not request.finished():
                if prefilled and request is not self._unbatched.begun:
                    changes.append(self.table.prefilled(request.rid))
            elif request.rid in self.table:
                self._unbatched.queued.order.finished(self.table[request.rid], len(request.output_ids))
                changes.append(self.table.finish(request))
        return changes
