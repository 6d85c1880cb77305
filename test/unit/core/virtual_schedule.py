"""Owns a schedule without an engine: `decide` drives virtual sequences that generate one token a decode step.

It does with plain lists what the boundary executor does with requests, and checks the limits of each action.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from virtual_sequences import computed_with, prompt_of

from sgl_batch.core.actions import Actions, BeginInterval, Chunk, Idle, Prefill, Refill, Step
from sgl_batch.core.admission import Admission, refusal, reserve
from sgl_batch.core.coroutine import Event, advance
from sgl_batch.core.decide import decide
from sgl_batch.core.decision_record import Observed
from sgl_batch.core.kv_policy import DeviceOnly
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.order.interface import OrderPolicy
from sgl_batch.core.page_boundary import State
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.plan import Plan
from sgl_batch.core.prefixes import PrefixTree, estimate_shared
from sgl_batch.core.primitives import combine, yield_
from sgl_batch.core.sequence import SequenceState, Status
from sgl_batch.core.sequence_queue import SequenceQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request that arrives at decision `at` and will generate `output` tokens per choice."""

    at: int
    prompt: int
    max_new: int
    output: int
    choices: int = 1


@dataclass(slots=True, kw_only=True)
class Log:
    """The events of a schedule, in order; lists hold arrival numbers of sequences."""

    decisions: int = 0
    prefilled: list[int] = field(default_factory=list)
    refilled: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    most_running: int = 0


class VirtualSchedule:
    """Runs requests to their ends. A fault of the decisions shows as an AssertionError, or in the `Log`."""

    def __init__(
        self,
        requests: list[Request],
        plan: Plan,
        *,
        pages: int,
        request_slots: int,
        order: OrderPolicy | None = None,
        urgent_every: int = 0,
    ) -> None:
        """`urgent_every`: number of decisions after which an urgent boundary is asked for; 0: never."""
        self.plan, self.request_slots = plan, request_slots
        self._urgent_every, self._urgent = urgent_every, False
        self.ledger = PageLedger(pages, plan.page_size)
        self.log = Log()
        self.records: list[dict[str, Any]] = []
        self._arriving = sorted(requests, key=lambda request: request.at)
        self._num_arrived = 0
        self._left: dict[str, int] = {}  # tokens that a sequence still generates
        self._generated: dict[str, int] = {}  # tokens that it generates in all
        self._queued = SequenceQueue(order)
        self._ready: list[SequenceState] = []
        self._running: list[SequenceState] = []
        self._begun: SequenceState | None = None
        self._tree = PrefixTree(plan.page_size)
        self._steps = 0
        self._filling = False
        self._changed = True

    def run(self, most_decisions: int) -> Log:
        """Decide and carry out until every request has finished; more decisions than allowed mean starvation."""
        while self._arriving or len(self._queued) or self._ready or self._running or self._begun:
            assert self.log.decisions < most_decisions, f"no end after {most_decisions} decisions"
            self._arrive()
            if self._urgent_every and self.log.decisions % self._urgent_every == 0:
                self._urgent = True
            self._do(self._decide())
            self.log.decisions += 1
            assert self.ledger.prompt_pages == self._tree.num_pages
            assert 0 <= self.ledger.free_pages <= self.ledger.total_pages
            assert len(self._running) + len(self._ready) <= self.request_slots
        assert self.ledger.reserved_pages == 0, "the last sequence gives back the last page"
        return self.log

    def _arrive(self) -> None:
        while self._arriving and self._arriving[0].at <= self.log.decisions:
            request = self._arriving.pop(0)
            self._changed = True
            group = f"g{self._num_arrived}" if request.choices > 1 else None
            for choice in range(request.choices):
                sequence = SequenceState(
                    sequence_id=f"s{self._num_arrived}",
                    arrival=self._num_arrived,
                    prompt_tokens=request.prompt,
                    max_new_tokens=request.max_new,
                    prompt_group=group,
                    choice=choice,
                )
                self._num_arrived += 1
                if refusal(sequence, self.ledger) is not None:
                    self.log.refused.append(sequence.arrival)
                    continue
                self._left[sequence.sequence_id] = self._generated[sequence.sequence_id] = request.output
                self._queued.add(sequence)

    def _decide(self) -> Actions:
        state = State(
            queued=self._queued.view(),
            ready=tuple(self._ready),
            running=len(self._running),
            steps=self._steps,
            request_slots=self.request_slots,
            free_request_slots=self.request_slots - len(self._running) - len(self._ready) - (self._begun is not None),
            filling=self._filling,
            changed=self._changed,
            queued_tokens=self._queued.tokens,
            begun=self._begun,
            urgent=self._urgent,
        )
        kv = KVState(
            device=self.ledger,
            admission=self.ledger,
            runners=lambda: self._running,
            estimate_shared=self._estimate_shared,
        )
        free_before = self.ledger.free_pages
        observed = Observed(state, kv)
        actions = decide(observed.state, observed.kv, self.plan, DeviceOnly())
        self.records.append(observed.record(self.plan, DeviceOnly.name, actions))
        assert actions == decide(state, kv, self.plan, DeviceOnly()), "the same state, the same actions"
        assert self.ledger.free_pages == free_before, "a decision reserves nothing"
        return actions

    def _estimate_shared(self, leaders: Iterable[SequenceState]) -> None:
        estimate_shared(((one, prompt_of(one)) for one in leaders), self._tree, rows=self.plan.prefill.b_moe)

    def _do(self, actions: Actions) -> None:
        self._filling = isinstance(actions[0], Prefill)
        for action in actions:
            match action:
                case Prefill(units=units, rest=rest):
                    self._prefill(units, rest)
                    self._changed = True
                case Refill(sequences=sequences):
                    self._refill(sequences)
                case BeginInterval():
                    self._steps = 0
                    self._changed = self._urgent = False
                case Step(prefill=chunks):
                    assert sum(chunk.tokens for chunk in chunks) <= self.plan.mix_prefill
                    whole = [chunk.sequence for chunk in chunks if self._compute(chunk)]
                    self._decode()
                    for sequence in whole:
                        self._prefilled(sequence)
                case _:
                    assert isinstance(action, Idle)
                    waiting = [*self._queued, *self._ready, *self._running]
                    assert waiting == [], "idle while there is work"

    def _prefill(self, units: tuple[Admission, ...], rest: Chunk | None) -> None:
        assert units or rest, "a prefill group has a prompt"
        tokens = sum(unit.leader.prefill_rows for unit in units) + (rest.tokens if rest else 0)
        assert tokens <= self.plan.prefill.b_moe or len(units) + (rest is not None) == 1
        if rest is not None:
            assert self._compute(rest), "the rest completes its prompt"
        for unit in units:
            self._take(unit)
        leaders = [unit.leader for unit in units]
        followers = [follower for unit in units for follower in unit.followers]
        for part in (leaders, followers):  # followers begin from their leader's KV, in a batch of their own
            combine(part, Event.COMBINE_PREFILL, "")
            ended = [rest.sequence, *part] if rest is not None and part is leaders else part
            for sequence in ended:
                self._prefilled(sequence)

    def _take(self, unit: Admission) -> None:
        leader = unit.leader
        match = self._tree.match_and_insert(leader.sequence_id, prompt_of(leader))
        assert match.shared * self.plan.page_size == leader.shared_tokens, "the estimate is the number of shared pages"
        reserve(unit, self.ledger, held=len(match.pages), new=len(match.own))
        for follower in unit.followers:
            self._tree.match_as(follower.sequence_id, leader.sequence_id, self.ledger.shared_pages(leader))
        for member in unit.members:
            self._queued.remove(member.sequence_id)

    def _prefilled(self, sequence: SequenceState) -> None:
        self._changed = True
        self.log.prefilled.append(sequence.arrival)
        self._left[sequence.sequence_id] -= 1
        finished = self._left[sequence.sequence_id] == 0
        yield_(sequence, finished=finished, why="")
        self._leave(sequence) if finished else self._ready.append(sequence)

    def _compute(self, chunk: Chunk) -> bool:
        """Compute a chunk, and return whether its prompt is complete."""
        self._begun = computed_with(chunk, self._begun, self.plan, self._take)
        return self._begun is None

    def _refill(self, sequences: tuple[SequenceState, ...]) -> None:
        assert sequences, "a refill takes a sequence"
        combine(sequences, Event.COMBINE_DECODE, "")
        self._ready = [sequence for sequence in self._ready if sequence.status is Status.READY]
        self._running += sequences
        self.log.refilled += [sequence.arrival for sequence in sequences]

    def _decode(self) -> None:
        assert 0 < len(self._running) <= self.plan.decode.b_moe
        assert self._steps < self.plan.boundary_tokens, "a boundary is overdue"
        self.log.most_running = max(self.log.most_running, len(self._running))
        self._steps += 1
        for sequence in list(self._running):
            self._left[sequence.sequence_id] -= 1
            if self._left[sequence.sequence_id] == 0:
                advance(sequence, Event.FINISH, "")
                self._running.remove(sequence)
                self._leave(sequence)

    def _leave(self, sequence: SequenceState) -> None:
        self.log.finished.append(sequence.arrival)
        self._queued.order.finished(sequence, self._generated.pop(sequence.sequence_id))
        self._changed = True
        self.ledger.release(sequence.sequence_id)
        self.ledger.add_prompt_pages(-len(self._tree.release(sequence.sequence_id)))
