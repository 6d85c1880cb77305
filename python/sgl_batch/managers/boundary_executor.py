"""Owns carrying out what core/ decides over a rank's sequences. It runs no forward pass: the scheduler does.

Theory of operation

A step is one forward pass: a decode step adds a token to each sequence of the decode batch, a prefill step computes a
group of prompts. A boundary is the moment between two decode steps at which the decode batch changes: sequences leave
it or join it, and KV moves between device and store. The decode steps between two boundaries are an interval. A
boundary is due after `boundary_tokens` steps, when nothing runs, or earlier where waiting sequences could double the
batch (BatchGen Algorithm 2; `core.page_boundary.boundary_due`).

`core.decide` decides, from plain views of the sequences and of their KV. It returns a list of actions. The executor
carries them out in order, and asks for the next list, until an action is for the device:

    scheduler -- next_batch --> decide(State, KVState, plan, policy) <-----------------------+
                                  |  actions, in this order:                                 |
                                  |    Sync                   copies to the store end        |
                                  |    Suspend, Evict         KV leaves the device           | until an action
                                  |    Extend                 runners get pages              | is for the device
                                  |    Restore, Refill, Join  sequences join the batch       |
                                  |    BeginInterval          the boundary is over  ---------+
                                  v
              a batch <-- Step, Prefill, PrefillChoices;    no batch <-- Idle
                 |
              forward pass, SGLang's results --> PassResults: sequences yield, finish, give back pages

With several ranks `RankSteps` replaces `next_batch`. The ranks agree on each step. At a boundary each extends its own
reservations (`extend_running`), and the control rank decides from the states of all. Either each rank prefills its part
(`prefill`); or sequences migrate, and then each rank refills its part (`refill`) or, where its policy is local
(`decides_alone`), decides alone (`cross_boundary`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from sgl_batch.core import actions, decide, growth
from sgl_batch.core.admission import Admission
from sgl_batch.core.coroutine import Event
from sgl_batch.core.exclusive import TierCapacity
from sgl_batch.core.kv_policy import KVPolicy
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.order.interface import Budgets, OrderPolicy
from sgl_batch.core.page_boundary import State
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.plan import Plan
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.core.primitives import combine
from sgl_batch.core.rank_state import Movable
from sgl_batch.core.sequence import SequenceState
from sgl_batch.core.sequence_queue import SequenceQueue
from sgl_batch.kv_offload.kv_form import KVForm
from sgl_batch.managers.interval_clock import IntervalClock
from sgl_batch.managers.pass_results import PassResults
from sgl_batch.managers.prefill_batches import PrefillBatches
from sgl_batch.managers.rank_view import CurrentRankView
from sgl_batch.managers.sequence_removal import SequenceRemoval, Unbatched
from sgl_batch.managers.sequence_table import SequenceTable
from sgl_batch.managers.trace import TraceWriter
from sgl_batch.metrics.counters import Counters, PartClock
from sgl_batch.requests import prompt_groups
from sgl_batch.sglang_adapter.moving import remove_from_batch
from sgl_batch.sglang_adapter.scheduling import decode_batches, merge_into
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch
from sgl_batch.sglang_adapter.types.requests import Request
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler

A = TypeVar("A", bound=actions.Action)


class BoundaryExecutor:
    """Carries out decisions over the sequences of one rank, and counts the steps since the last boundary.

    `table` has the sequences, `kv` their KV. `removal` aborts and retracts sequences. `results` follows forward passes.
    `mixed_prefill`: prompts that go through the same forward pass as the decode batch that was returned last. The
    scheduler takes it and sets it to None. `paused`: no step begins; new requests are queued.
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
        self._interval = IntervalClock()
        self.results = PassResults(self.table, self._unbatched, kv, self._prompts, self._interval, counters)
        self.removal = SequenceRemoval(scheduler, self.table, self._unbatched, kv, self.join_arrived)
        self._steps = self._boundaries = 0
        self._filling = self._urgent = False
        self._changes_at_boundary = -1
        self.mixed_prefill: ScheduleBatch | None = None
        self.paused = False

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._in_force.plan

    # Intake.

    def enqueue(self, request: Request) -> None:
        """Enter a request as a QUEUED sequence. One that can never fit ends with its error.

        Args:
            request: a new or resumed request, which the caller has appended to the scheduler's waiting queue.
        """
        sequence = self.table.enter(request)
        for action in self.table.decided_on_arrival(sequence):
            self._do(action, self._scheduler.running_batch, 0.0)
        self._unbatched.queued.add(sequence)

    def invalidate_shared_prompts(self) -> None:
        """Share the KV of earlier prompts with no later prompt, because the weights change."""
        self.kv.sharing.invalidate()

    @property
    def has_kv(self) -> bool:
        """Whether any sequence has KV. QUEUED sequences have none."""
        return self.table.num_sequences > len(self._unbatched.queued)

    # Decide, then do.

    def next_batch(self, running: ScheduleBatch) -> tuple[ScheduleBatch | None, ScheduleBatch]:
        """Decide and carry out actions until one is for the device.

        Args:
            running: the decode batch, without finished requests. It is changed in place or replaced.

        Returns:
            The batch to run next, or None where there is nothing to do; and the decode batch from now on.
        """
        began = time.perf_counter()
        while True:
            for action in self._recorded(running, lambda state, kv: decide.decide(state, kv, self.plan, self._policy)):
                match action:
                    case actions.Step():
                        return self.step(action, running), running
                    case actions.Prefill():
                        return self.prefill(action), running
                    case actions.PrefillChoices(most=most):
                        return self.prefill_choices(most), running
                    case actions.Idle():
                        self._filling = False
                        return None, running
                    case _:
                        running = self._do(action, running, began)

    def extend_running(self, running: ScheduleBatch) -> ScheduleBatch:
        """Extend the reservations of running sequences at a boundary of several ranks, where reservations grow."""
        if self.admission_ledger.policy.grows:
            for action in self._recorded(
                running, lambda _, kv: growth.extend_running(kv, self.plan), decision="growth"
            ):
                running = self._do(action, running, 0.0)
        return running

    def cross_boundary(self, running: ScheduleBatch, *, others_run: bool) -> ScheduleBatch:
        """Decide alone at a boundary of several ranks at which none prefills, up to the begin of the interval.

        Args:
            running: the decode batch, without finished requests.
            others_run: whether another rank has sequences to decode, which a wait for copies here would hold up.

        Returns:
            The decode batch from now on. Choices that have forked meanwhile end this early; they are prefilled next.
        """

        def make(state: State, kv: KVState) -> actions.Actions:
            return self._policy.at_boundary(state, kv, self.plan, others_run=others_run)

        began, boundaries = time.perf_counter(), self._boundaries
        while self._boundaries == boundaries and not self._unbatched.forked:
            for action in self._recorded(running, make, decision="boundary", others_run=others_run):
                running = self._do(
                    actions.BeginInterval() if isinstance(action, actions.Idle) else action, running, began
                )
        return running

    def composed_step(self, running: ScheduleBatch) -> ScheduleBatch | None:
        """Return this rank's batch in a decode step of several ranks; None where it has no rows. See `step`."""
        if not self.plan.mix_prefill or self.table.partition:  # all ranks of a set have the same rows
            return self.step(actions.Step(), running)
        (action,) = self._recorded(
            running, lambda state, kv: (decide.compose(state, kv, self.plan, self._policy),), decision="step"
        )
        return self.step(action, running)

    def _recorded(
        self,
        running: ScheduleBatch,
        make: Callable[[State, KVState], tuple[A, ...]],
        *,
        decision: str = "next",
        others_run: bool = False,
    ) -> tuple[A, ...]:
        """Return the decision of `make`, which is written to the trace where there is one."""
        state, kv, name = self.state(running), self.kv_state(running), self._policy.name
        return self._trace.decided(make, state, kv, self.plan, name, decision, others_run=others_run)

    def _do(self, action: actions.Action, running: ScheduleBatch, boundary_began: float) -> ScheduleBatch:
        """Carry out an action that is not for the device; return the decode batch."""
        match action:
            case actions.Sync(wait=wait):
                self.kv.sync(wait=wait)
            case actions.Join(wait=wait):
                running = self.join_arrived(running, wait=wait)
            case actions.Suspend(sequences=sequences, why=why):
                self.suspend(sequences, running, why)
            case actions.Evict(sequences=sequences):
                self.kv.to_store([self.table.request_named(s.sequence_id) for s in sequences])
                self._counters.add("evictions", len(sequences))
            case actions.Extend(pages=pages):
                for sequence, number in pages:
                    self.ledger.resize(sequence.sequence_id, number)
            case actions.Grow():
                growth.carry_out(action, self.admission_ledger)
                self._counters.add("reservations_exceeded", int(action.borrower is not None))
            case actions.Restore(pages=pages):
                for sequence, number in pages:
                    self.ledger.reserve(sequence.sequence_id, number, whole=self.ledger.whole_pages(sequence))
                    self.kv.restore(self.table.take_ready(sequence.sequence_id))
            case actions.Refill(sequences=sequences):
                running = self.refill(sequences, running)
            case actions.StreamDecode(on=on):
                self.kv.stream(on=on)
            case actions.BeginInterval():
                self.begin_interval(running, boundary_began)
            case actions.Abort(sequences=sequences, why=why):
                for sequence in sequences:
                    self.removal.abort(sequence, why)
            case actions.Migrate() | actions.Partition() | actions.EndPartition() | actions.Hold():
                raise AssertionError(f"{type(action).__name__} is carried out by all ranks together, in RankSteps")
            case _:
                raise AssertionError(f"{action} is for the device")
        return running

    # The state from which decisions are made.

    @property
    def is_empty(self) -> bool:
        return self.table.is_empty

    @property
    def ledger(self) -> PageLedger:
        """The account of the device's pages."""
        return self.kv.device

    @property
    def admission_ledger(self) -> PageLedger:
        """The account in which admission reserves all pages that a sequence can need."""
        return self.kv.admission

    @property
    def clock(self) -> PartClock:
        """The clock of this rank's time by part."""
        return self._counters.clock

    @property
    def decides_alone(self) -> bool:
        """Whether this rank, one of several, decides alone at a boundary at which no rank prefills."""
        return self._policy.is_local

    def store_state(self) -> dict[str, int]:
        """Return the counts of the host KV store; an empty dict where there is none."""
        if self.is_empty:  # a client that has all answers then reads that all pages are free
            self.sync()
        return self.kv.counts()

    def sync(self) -> None:
        """Wait until all copies to the store are complete."""
        self.kv.sync(wait=True)

    def capacity(self, running: ScheduleBatch) -> TierCapacity | None:
        """Return the room of each tier for prompts where a page lies in one tier alone; None elsewhere."""
        return self._policy.capacity(self.state(running), self.kv_state(running), self.plan)

    def estimate_shared(self, state: State) -> None:
        """Note, for the first queued sequences of `state`, what their prompts share with earlier ones."""
        decide.estimate_shared(state, self.kv_state(None))

    def state(self, running: ScheduleBatch) -> State:
        """Return the state of this rank's sequences, as decisions see it.

        `queued` and `ready` are views, so that a step between boundaries costs the same with any length of the queue.
        They are valid until a sequence changes.

        Args:
            running: the decode batch.
        """
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

    def request_boundary(self) -> None:
        """Make the next boundary come with the next step, on all ranks."""
        self._urgent = True

    @property
    def begun(self) -> SequenceState | None:
        """The sequence whose prompt decode steps have computed in part, or None."""
        request = self._unbatched.begun
        return None if request is None else self.table[request.rid]

    def kv_state(self, running: ScheduleBatch | None) -> KVState:
        """Return where KV lies. With `running` None, the state must not be asked for its runners."""
        return self.kv.state(CurrentRankView(self.table, self.kv.sharing, self.plan, self._interval.interval, running))

    def _groups_awaiting_grammar(self) -> set[str]:
        """Return the prompt groups of which a choice waits for its grammar: the others wait, to share the prompt."""
        tags = (prompt_groups.decode(r.extra_key) for r in self._scheduler.grammar_manager.grammar_queue)
        return {tag.group for tag in tags if tag is not None}

    def queued_named(self, names: list[str]) -> list[SequenceState]:
        """Return queued sequences by id."""
        return [self._unbatched.queued[name] for name in names]

    def ready_named(self, names: list[str]) -> tuple[SequenceState, ...]:
        """Return READY sequences by id. Ids of sequences that are not here are left out: their migration failed."""
        return self.table.ready_named(names)

    def movable(self, running: ScheduleBatch) -> tuple[list[Movable], list[Movable]]:
        """Return the READY and the RUNNING sequences that can migrate to another rank now."""
        ready, run = self.table.movable(running, self.plan)
        return self._policy.movable(ready, run, self.kv_state(running), self.plan)

    @property
    def num_forked(self) -> int:
        """The number of choices whose leader has just computed their prompt."""
        return len(self._unbatched.forked)

    # Steps that begin before the results of the step before are processed.

    @property
    def overlaps(self) -> bool:
        """Whether the next decode step can begin before the results of the last one are processed.

        A streamed step cannot: its KV must be in the store before the next one reads it.
        """
        return not self.kv_state(None).streams

    def decode_continues(self, running: ScheduleBatch) -> bool:
        """Return whether a step of this decode batch comes next whatever the results under way are."""
        return decide.decode_continues(self.state(running), self.kv_state(running), self.plan)

    # Actions.

    def prefill_choices(self, most: int) -> ScheduleBatch:
        """Return the batch that computes the last prompt token of up to `most` choices whose leader did the rest.

        Some choice must have forked (`num_forked`).
        """
        return self._prompts.choices(most)

    def prefill(self, action: actions.Prefill) -> ScheduleBatch:
        """Return the batch of a prefill group. Prefill continues from now on until enough sequences are READY.

        Args:
            action: units of QUEUED sequences that fit, or the rest of a begun prompt, or both. The units leave the
                queue, with all pages reserved that they can need.
        """
        self._filling = True
        return self._prompts.group(action)

    def assign_tier(self, units: tuple[Admission, ...], running: ScheduleBatch) -> actions.Prefill:
        """Return a prefill of these units, with the location that the policy chooses for their KV."""
        return decide.prefill_of(units, self.state(running), self.kv_state(running), self.plan, self._policy)

    def refill(self, sequences: tuple[SequenceState, ...], running: ScheduleBatch) -> ScheduleBatch:
        """Combine waiting sequences into the decode batch, and return it.

        Args:
            sequences: READY sequences whose KV lies where the coming steps find it.
            running: the decode batch.
        """
        requests = [self.table.take_ready(sequence.sequence_id) for sequence in sequences]
        self.kv.prepare_to_run(requests)
        return self._combine(requests, running, f"refill at a boundary after {self._steps} steps")

    def join_arrived(self, running: ScheduleBatch, *, wait: bool = False) -> ScheduleBatch:
        """Combine the sequences whose KV has arrived on the device into the decode batch, and return it.

        Args:
            running: the decode batch.
            wait: whether to wait for all KV on its way.
        """
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
        """Take running sequences out of the decode batch, and move their KV to the store before this returns.

        Args:
            sequences: RUNNING sequences of `running`. They are SUSPENDED afterwards.
            running: the decode batch, changed in place.
            why: the reason, for the trace.
        """
        requests = [self.table.request_named(sequence.sequence_id) for sequence in sequences]
        for request in requests:
            self.table.grown(request)
            remove_from_batch(running, request)
        self.kv.to_store(requests)
        self.table.record([self.table.suspended(request.rid, why) for request in requests])
        self._counters.add("suspensions", len(requests))

    def begin_interval(self, running: ScheduleBatch, boundary_began: float) -> None:
        """End a boundary that began at `boundary_began` (`time.perf_counter`): count steps from here."""
        self._counters.add("boundaries")
        self._filling = self._urgent = False
        self._steps = 0
        self._boundaries += 1
        self._changes_at_boundary = self.table.changes
        alive = len(running.reqs) + len(self.kv.returning) + len(self.table.ready)
        self._interval.begin(alive, boundary_began=boundary_began)

    def step(self, action: actions.Step, running: ScheduleBatch) -> ScheduleBatch | None:
        """Count a step and return its batch.

        Args:
            action: a step of the whole decode batch, with chunks of prompts for the same forward pass.
            running: the decode batch, changed in place.

        Returns:
            The decode batch, with the chunks as `mixed_prefill`; the chunks alone where nothing runs; None where this
            rank has no rows.
        """
        assert action.decode is None, "a step decodes the whole decode batch"
        chunks = self._prompts.chunks(action) if action.prefill else None
        if not running.reqs:
            self.count_step()
            return chunks
        self.mixed_prefill = chunks
        return self.decode_step(running)

    def decode_step(self, running: ScheduleBatch) -> ScheduleBatch:
        """Count a step of the decode batch, prepare the batch for it in place, and return it."""
        self._interval.begin_step(len(running.reqs))
        self.kv.step(running, self.plan)
        self.count_step()
        return running

    def count_step(self) -> None:
        """Count a decode step of the group, whether or not this rank has rows in it."""
        self._filling = False
        self._steps += 1
        self._counters.add("decode_steps")
