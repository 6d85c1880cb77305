"""Owns the sequences of a rank: their requests, states and reserved pages, from arrival to end or departure.

core/ decides which sequences run, wait or move next. The boundary executor makes batches of them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Protocol

from sgl_batch.core.actions import Actions
from sgl_batch.core.admission import arriving_pages, first_pages
from sgl_batch.core.coroutine import Event, Transition, advance
from sgl_batch.core.decide import on_arrival
from sgl_batch.core.decision_record import arrival_record
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.plan import Plan
from sgl_batch.core.primitives import migrate, partition, yield_
from sgl_batch.core.rank_state import Movable
from sgl_batch.core.sequence import SequenceState, Status
from sgl_batch.core.sequence_queue import SequencesView
from sgl_batch.core.waiting_pool import enter_in_turn
from sgl_batch.managers.trace import TraceWriter
from sgl_batch.metrics.counters import Counters
from sgl_batch.requests import prompt_groups
from sgl_batch.sglang_adapter.moving import movable, replicable
from sgl_batch.sglang_adapter.scheduling import needs_whole_prompt, shares_prefix
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch
from sgl_batch.sglang_adapter.types.requests import Request

# Lengths of outputs that are kept until the control rank gets them; one rank alone never sends them.
_MOST_ENDED = 1 << 16
# More sequences than begin to wait on a rank between two boundaries.
_TURNS = 1 << 32


class SharedPrompts(Protocol):
    """The account of which sequences hold the pages that prompts share."""

    def leave(self, request_id: str) -> int:
        """Remove a sequence that has ended or left; return how many pages no sequence holds any more."""


class SequenceTable:
    """Sequences and requests by id, the READY ones in order, and the accounts of pages.

    `changes` counts arrivals and changes of state, so that an unchanged state is not decided over again.
    `store_ledger`: the account of the store's pages, where KV can wait there. SUSPENDED sequences count as READY here.
    `most_prompt_tokens`: where the device has a budget, the longest prompt that it has working memory for.
    """

    def __init__(
        self,
        ledger: PageLedger,
        sharing: SharedPrompts,
        counters: Counters,
        trace: TraceWriter,
        *,
        store_ledger: PageLedger | None = None,
        most_prompt_tokens: int | None = None,
        rank: int = 0,
    ) -> None:
        self.ledger, self.store_ledger = ledger, store_ledger
        self.most_prompt_tokens = most_prompt_tokens
        self._ranks = frozenset((rank,))
        self.changes = 0
        self._ended: deque[int] = deque(maxlen=_MOST_ENDED)
        self._sharing, self._counters, self._trace = sharing, counters, trace
        self._sequences: dict[str, SequenceState] = {}
        self._requests: dict[str, Request] = {}
        self._ready: dict[str, SequenceState] = {}
        self._choices: dict[str, SequenceState] = {}
        self._partitioned: dict[str, SequenceState] = {}
        self._arrivals = self._waits = 0

    @property
    def _admission_ledger(self) -> PageLedger:
        """The account in which admission reserves all pages that a sequence can need."""
        return self.store_ledger or self.ledger

    @property
    def is_empty(self) -> bool:
        return not self._sequences

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def num_by_status(self) -> dict[str, int]:
        """Return how many sequences are in each state now. Their owners count those that are replicas here."""
        states = (sequence.status for sequence in self._sequences.values())
        return dict(Counter(status.value for status in states if status is not Status.REPLICA))

    def __contains__(self, name: str) -> bool:
        return name in self._sequences

    def __getitem__(self, name: str) -> SequenceState:
        return self._sequences[name]

    def request_named(self, name: str) -> Request:
        """Return the request of a sequence of this rank."""
        return self._requests[name]

    def grown(self, request: Request) -> SequenceState:
        """Return the sequence of a running request, with its number of tokens up to date."""
        sequence = self._sequences[request.rid]
        sequence.generated_tokens = len(request.output_ids)
        return sequence

    @property
    def ready(self) -> SequencesView:
        """The READY and SUSPENDED sequences, in order, as a view."""
        return SequencesView(self._ready)

    @property
    def choices(self) -> SequencesView:
        """The waiting choices whose last prompt token is to be computed, as a view."""
        return SequencesView(self._choices)

    def ready_named(self, names: list[str]) -> tuple[SequenceState, ...]:
        """Return READY sequences by id. Ids of sequences that are not here are left out: their migration failed."""
        return tuple(self._ready[name] for name in names if name in self._ready)

    # Arrivals, changes of state, ends.

    def can_resume(self, request: Request, tokens: int) -> bool:
        """Return whether a new request can resume after `tokens` tokens that another engine has generated."""
        rows = len(request.origin_input_ids) + tokens
        has_room = self.most_prompt_tokens is None or rows <= self.most_prompt_tokens
        return has_room and request.to_finish is None and tokens < request.sampling_params.max_new_tokens

    def enter(self, request: Request) -> SequenceState:
        """Add a request as a QUEUED sequence."""
        sequence = self._sequence_of(request)
        assert sequence.sequence_id not in self._sequences, f"request id {sequence.sequence_id} is in use"
        # There is no KV here of tokens that another engine has generated.
        sequence.generated_tokens, sequence.computed_tokens = len(request.output_ids), 0
        self._keep(sequence, request)
        self.changes += 1
        return sequence

    def decided_on_arrival(self, sequence: SequenceState) -> Actions:
        """Return the actions for a sequence that has just arrived, and write the decision to the trace."""
        device, store, most = self.ledger, self.store_ledger, self.most_prompt_tokens
        actions = on_arrival(sequence, device, store, most_prompt_tokens=most)
        if actions and self._trace.is_open:
            self._trace.write_decision(arrival_record(sequence, device, store, most, actions))
        return actions

    def refuse(self, sequence: SequenceState, why: str) -> None:
        """Make a new sequence end with this error. SGLang answers it after the prefill of a single token."""
        request = self._requests[sequence.sequence_id]
        request.set_finish_with_abort(why)
        refused = self._sequence_of(request)
        sequence.prompt_tokens, sequence.max_new_tokens = refused.prompt_tokens, refused.max_new_tokens
        sequence.prompt_group, sequence.in_one_pass = refused.prompt_group, refused.in_one_pass

    def _keep(self, sequence: SequenceState, request: Request) -> None:
        self._arrivals += 1
        self._sequences[sequence.sequence_id], self._requests[sequence.sequence_id] = sequence, request

    def _sequence_of(self, request: Request) -> SequenceState:
        tag = prompt_groups.decode(request.extra_key)
        refused = request.to_finish is not None
        prompt_tokens = len(request.origin_input_ids)
        shares = tag is not None and not needs_whole_prompt(request) and not refused
        return SequenceState(
            sequence_id=request.rid,
            arrival=self._arrivals,
            prompt_tokens=prompt_tokens,
            max_new_tokens=1 if refused else request.sampling_params.max_new_tokens,
            prompt_group=tag.group if tag is not None and shares else None,
            choice=tag.index if tag is not None else 0,
            in_one_pass=request.return_logprob or not shares_prefix(request),
            computed_tokens=prompt_tokens + len(request.output_ids) - 1 if request.output_ids else 0,
            ranks=self._ranks,
        )

    def record(self, changes: list[Transition]) -> None:
        """Count changes of state, and write them to the trace, which has the life of a sequence where it is owned."""
        self.changes += len(changes)
        self._trace.write([change for change in changes if Status.REPLICA not in (change.before, change.after)])

    def prefilled(self, name: str) -> Transition:
        """Make a sequence READY that has its prompt's KV."""
        return yield_(self._wait(name), finished=False, why="its KV is kept for decode")

    def suspended(self, name: str, why: str) -> Transition:
        """Make a sequence SUSPENDED that ran, and whose KV is in the store."""
        return advance(self._wait(name), Event.SUSPEND, why)

    def retracted(self, request: Request) -> SequenceState:
        """Make a sequence QUEUED that has lost its KV. It keeps its tokens, and leaves its prompt group."""
        sequence = self._sequences[request.rid]
        sequence.generated_tokens = len(request.output_ids)
        if sequence.status is not Status.QUEUED:
            in_part = sequence.status is Status.PREFILLING
            self.record([advance(sequence, Event.RETRACT, "its KV is given up")])
            sequence.lost_tokens = sequence.computed_tokens if in_part else sequence.kv_tokens
        self._leave_ready(request.rid)
        self._give_back(sequence)
        self._partitioned.pop(request.rid, None)
        sequence.prompt_group, sequence.choice, sequence.ranks = None, 0, self._ranks
        sequence.computed_tokens = sequence.shared_tokens = 0
        self.changes += 1
        self._counters.add("retractions")
        return sequence

    def forked(self, name: str) -> None:
        """Let a QUEUED choice wait in the store, with KV of all of its prompt but the last token."""
        self._choices[name] = self._wait(name)

    def at_boundary(self, number: int) -> None:
        """Let sequences that wait from now on wait since this boundary, so that their turns compare on all ranks.

        `number`: how many boundaries the ranks have agreed on.
        """
        self._waits = max(self._waits, number * _TURNS)

    def _wait(self, name: str) -> SequenceState:
        sequence = self._ready[name] = self._sequences[name]
        self._waits += 1
        sequence.waits_since = self._waits
        return sequence

    def take_ready(self, name: str) -> Request:
        """Take a sequence out of the READY ones, and return its request."""
        del self._ready[name]
        self._choices.pop(name, None)
        return self._requests[name]

    def _leave_ready(self, name: str) -> None:
        self._ready.pop(name, None)
        self._choices.pop(name, None)

    def finish(self, request: Request) -> Transition:
        """End a sequence whose request has finished or was aborted, and free its pages."""
        sequence = self._sequences[request.rid]
        sequence.generated_tokens = len(request.output_ids)
        assert request.finished_reason is not None, f"finish() needs a finished request, and {request.rid} is not"
        reason = request.finished_reason.to_json()
        aborted, owned = reason.get("type") == "abort", not self.is_replica(request.rid)
        change = advance(sequence, Event.ABORT if aborted else Event.FINISH, f"finish reason: {reason['type']}")
        self._counters.add("sequences_aborted" if aborted else "sequences_finished", int(owned))
        self._counters.add("generated_tokens", sequence.generated_tokens if owned else 0)
        if owned and not aborted:
            self._ended.append(sequence.generated_tokens)
        self._drop(sequence)
        return change

    def take_ended(self) -> list[int]:
        """Return the lengths of the outputs that have ended since the last call of this, of many the last ones."""
        ended = list(self._ended)
        self._ended.clear()
        return ended

    def abort_queued(self, sequence: SequenceState) -> None:
        """End a QUEUED sequence that was aborted."""
        self.record([advance(sequence, Event.ABORT, "aborted in the queue")])
        self._counters.add("sequences_aborted")
        self._drop(sequence)

    def _drop(self, sequence: SequenceState) -> None:
        del self._sequences[sequence.sequence_id], self._requests[sequence.sequence_id]
        self._partitioned.pop(sequence.sequence_id, None)
        self._give_back(sequence)

    def _give_back(self, sequence: SequenceState) -> None:
        for ledger in (self.ledger, self.store_ledger):
            if ledger is not None and ledger.holds(sequence.sequence_id):
                ledger.release(sequence.sequence_id)
        self._admission_ledger.add_prompt_pages(-self._sharing.leave(sequence.sequence_id))

    # Migration.

    def is_running(self, name: str) -> bool:
        """Return whether a sequence is in the decode batch."""
        return self._sequences[name].status is Status.RUNNING

    def movable(self, running: ScheduleBatch, plan: Plan) -> tuple[list[Movable], list[Movable]]:
        """Return the waiting and the running sequences whose state can be written down.

        Pages that one of them shares stay with the others that hold them, and are copied.
        """
        ready = [self._movable(sequence, plan) for sequence in self._ready.values()]
        owned = (request for request in running.reqs if not self.is_replica(request.rid))
        run = [self._movable(self.grown(request), plan) for request in owned]
        return [item for item in ready if item is not None], [item for item in run if item is not None]

    def _movable(self, sequence: SequenceState, plan: Plan) -> Movable | None:
        request, ledger = self._requests[sequence.sequence_id], self._admission_ledger
        if not request.output_ids or not movable(request):
            return None
        pages = arriving_pages(sequence, ledger, plan)
        gap = ledger.whole_pages(sequence) - pages
        leased = ledger.held(sequence.sequence_id) if ledger.pool_pages and not ledger.two_tiers else 0
        return Movable(
            sequence=sequence,
            tokens=request.kv_committed_len,
            pages=pages,
            gap=gap,
            leased=leased,
            replicable=replicable(request),
        )

    def queue_movable(self, queued: Iterable[SequenceState], plan: Plan) -> list[Movable]:
        """Return those of these queued sequences that can be written down and share no prompt with other choices."""
        ledger, found = self._admission_ledger, []
        for sequence in queued:
            if sequence.prompt_group is None and movable(self._requests[sequence.sequence_id]):
                pages = first_pages(sequence, ledger, plan)
                gap = ledger.whole_pages(sequence) - pages
                found.append(Movable(sequence=sequence, tokens=0, pages=pages, gap=gap))
        return found

    def expect(self, request: Request, plan: Plan) -> str | None:
        """Reserve pages for a sequence that may arrive. Where there is no room, return why, with the numbers."""
        ledger, sequence = self._admission_ledger, self._arriving(request)
        pages, whole = arriving_pages(sequence, ledger, plan), ledger.whole_pages(sequence)
        if ledger.has_waiting:
            return "sequences wait for pages there, and come first"
        if not ledger.fits(pages, gap=whole - pages):
            now = f"it needs {pages} pages now, and" if ledger.policy.grows else "it"
            return f"{now} can need {whole} pages and {ledger.free_pages} are free"
        ledger.reserve(request.rid, pages, whole=whole)
        return None

    def reserve_ahead(self, name: str, *, pages: int, gap: int) -> bool:
        """Reserve pages for a sequence that may arrive at a later boundary; return whether there is room.

        `expect_no_more` frees them.
        """
        ledger = self._admission_ledger
        if ledger.has_waiting or not ledger.fits(pages, gap=gap):
            return False
        ledger.reserve(name, pages, whole=pages + gap)
        return True

    def _arriving(self, request: Request) -> SequenceState:
        """Return a sequence with KV of its own: a choice of another rank's prompt shares none of it here."""
        sequence = self._sequence_of(request)
        sequence.generated_tokens = len(request.output_ids)
        sequence.prompt_group, sequence.choice = None, 0
        return sequence

    def expect_no_more(self, name: str) -> None:
        """Free the pages of an expected sequence that does not arrive."""
        self._admission_ledger.release(name)

    def adopt(self, request: Request, waits_since: int | None = None) -> None:
        """Add a sequence that has arrived with its KV, as READY.

        `waits_since`: its turn on the rank where it waited, which it keeps; None if it waits from now on.
        """
        sequence = self._arriving(request)
        sequence.status = Status.MIGRATING
        self._keep(sequence, request)
        if waits_since is None:
            self._wait(request.rid)
        else:
            sequence.waits_since, self._waits = waits_since, max(self._waits, waits_since)
            enter_in_turn(self._ready, sequence, lambda one: self.ledger.holds(one.sequence_id))
        self.record([migrate(sequence, Event.ARRIVE, "moved here to even out the ranks")])
        self._counters.add("sequences_arrived")

    def depart(self, name: str) -> None:
        """Remove a sequence that belongs to another rank now."""
        sequence = self._sequences[name]
        self.record([migrate(sequence, Event.DEPART, "moved away to even out the ranks")])
        self._counters.add("sequences_departed")
        self._leave_ready(name)
        self._drop(sequence)

    # Partitions.

    @property
    def partition(self) -> frozenset[int]:
        """The ranks over which sequences of this rank are partitioned; empty if none is."""
        return next(iter(self._partitioned.values())).ranks if self._partitioned else frozenset()

    @property
    def num_replicas(self) -> int:
        """The number of sequences here that another rank owns."""
        return sum(map(self.is_replica, self._partitioned))

    def is_replica(self, name: str) -> bool:
        """Return whether another rank owns this sequence, of which a replica is here."""
        sequence = self._partitioned.get(name)
        return sequence is not None and sequence.status is Status.REPLICA

    def expect_replica(self, request: Request) -> str | None:
        """Reserve all pages that a replica can need. Where there is no room, return why, with the numbers."""
        pages = self.ledger.whole_pages(self._sequence_of(request))
        if not self.ledger.fits(pages):
            return f"its replica can need {pages} pages and {self.ledger.free_pages} are free"
        self.ledger.reserve(request.rid, pages, whole=pages)
        return None

    def expect_no_replica(self, name: str) -> None:
        """Free the pages of an expected replica that does not arrive."""
        self.ledger.release(name)

    def adopt_replica(self, request: Request) -> None:
        """Add a replica that has arrived with its KV."""
        sequence = self._sequence_of(request)
        sequence.status, sequence.generated_tokens = Status.MIGRATING, len(request.output_ids)
        self._keep(sequence, request)
        self._partitioned[request.rid] = sequence
        self.record([advance(sequence, Event.REPLICATE, "it is partitioned")])

    def drop_replica(self, name: str) -> None:
        """Remove a replica, whose KV is free already."""
        sequence = self._sequences[name]
        self.record([migrate(sequence, Event.DEPART, "its partition has ended")])
        self._drop(sequence)

    def reserve_whole(self, names: Iterable[str]) -> bool:
        """Let these sequences reserve all device pages that they can need; return whether there is room for that."""
        ledger = self.ledger
        for name in names:
            whole = self._whole_on_device(name)
            if ledger.held(name) < whole:
                if not ledger.can_resize(name, whole):
                    return False
                ledger.resize(name, whole)
        return True

    def _whole_on_device(self, name: str) -> int:
        """Return the device pages that a sequence can need in all. Beside a store it reserves them by the interval."""
        if self._admission_ledger is self.ledger:
            return self.ledger.whole_need(name)
        return max(self.ledger.held(name), self.ledger.whole_pages(self._sequences[name]))

    def replica_room(self, running: ScheduleBatch) -> int | None:
        """Return the device pages for replicas beside all that this rank's sequences can need, at least 0.

        Returns None where admission has the account of the device, from which it follows.
        """
        if self._admission_ledger is self.ledger:
            return None
        names = [request.rid for request in running.reqs]
        growth = sum(self._whole_on_device(name) - self.ledger.held(name) for name in names if self.ledger.holds(name))
        return max(0, self.ledger.free_pages - growth)

    def begin_partition(self, names: Iterable[str], ranks: frozenset[int]) -> None:
        """Let these sequences, RUNNING and replicas, belong to these ranks."""
        changes = []
        for name in names:
            sequence = self._partitioned[name] = self._sequences[name]
            if sequence.status is Status.REPLICA:
                sequence.ranks = ranks
            else:
                changes.append(partition(sequence, ranks, f"partitioned over ranks {sorted(ranks)}"))
        self.record(changes)
        self._counters.add("sequences_partitioned", len(changes))

    def end_partition(self) -> None:
        """Let the sequences that are left belong to this rank alone. Replicas have been dropped."""
        left, self._partitioned = self._partitioned, {}
        self.record([partition(sequence, self._ranks, "its partition has ended") for sequence in left.values()])
