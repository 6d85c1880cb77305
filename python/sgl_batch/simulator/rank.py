"""Owns one simulated rank: it does with numbers what the boundary executor does with requests (managers/)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from sgl_batch.core import growth
from sgl_batch.core.actions import (
    Action,
    BeginInterval,
    Chunk,
    Evict,
    Extend,
    Grow,
    Idle,
    Prefill,
    Refill,
    Restore,
    StreamDecode,
    Suspend,
    Sync,
)
from sgl_batch.core.admission import Admission, note_expected, refusal
from sgl_batch.core.coroutine import Event, advance
from sgl_batch.core.kv_state import Interval, KVState
from sgl_batch.core.node_pool import device_room
from sgl_batch.core.page_boundary import State
from sgl_batch.core.plan import Plan
from sgl_batch.core.primitives import combine, migrate, yield_
from sgl_batch.core.rank_agreement import MOST_QUEUED, RankHeader, rank_is_due
from sgl_batch.core.rank_state import Movable, RankState
from sgl_batch.core.residency import pages_to_run
from sgl_batch.core.sequence import SequenceState, Status
from sgl_batch.core.sequence_queue import SequencesView
from sgl_batch.core.waiting_pool import Room, Waiter, enter_in_turn
from sgl_batch.simulator.decode_group import DecodeGroup, Returning
from sgl_batch.simulator.kv_forms import KVForm
from sgl_batch.simulator.requests import RankQueue, Requests
from sgl_batch.simulator.work import pairs_of

# More sequences than begin to wait on a rank between two boundaries.
_TURNS = 1 << 32


@dataclass(slots=True)
class Tally:
    """Counts of a rank. Tokens; `again` are prompt tokens that were computed before and lost."""

    finished: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    again: int = 0
    suspensions: int = 0
    restores: int = 0
    moved_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Prompts:
    """What a rank computes of prompts in one pass: how many, their tokens, and pairs of a token and one it looks at."""

    count: int = 0
    tokens: int = 0
    pairs: int = 0


class SimulatedRank:
    """The sequences of one rank, and its accounts of pages. Decode steps advance all running sequences together.

    Args:
        requests: Of the whole simulation.
        numbers: Those that are queued here from the start.
        plan: In force for the whole simulation.
        form: Where its KV lies.
        request_slots: The most sequences that it can hold.
    """

    def __init__(
        self, requests: Requests, numbers: Iterable[int], plan: Plan, form: KVForm, *, request_slots: int
    ) -> None:
        self.plan, self.form, self.tally = plan, form, Tally()
        self.requests, self.request_slots = requests, request_slots
        # Lengths of the outputs that have ended here and were not taken.
        self._ended = array("q")
        self.queue = RankQueue(requests, self._admissible(numbers))
        self.ready: dict[str, SequenceState] = {}
        self.group, self.returning = DecodeGroup(self._length), Returning()
        self.begun: SequenceState | None = None
        # Called with each sequence that has ended here.
        self.on_end: Callable[[SequenceState], None] | None = None
        self.boundaries = 0
        self.now = 0.0
        self._steps = self._changes = self._waits = 0
        self._changes_at_boundary = -1
        self._filling = False
        self._interval = Interval()
        self._most_in_memory = 0

    def _admissible(self, numbers: Iterable[int]) -> list[int]:
        store = self.form.admission if self.has_store else None
        found = []
        for number in numbers:
            sequence = self.requests.sequence(number)
            fits = refusal(sequence, self.form.device, store, most_prompt_tokens=None) is None
            found += [number] if fits else []
            self.tally.refused += not fits
        return found

    def arrive(self, number: int) -> None:
        """Queue a sequence, or refuse it if it can never fit."""
        for one in self._admissible([number]):
            self.queue.add(one)
            self._changes += 1

    # What decisions see.

    @property
    def running(self) -> Mapping[str, SequenceState]:
        """Return the running sequences by id."""
        return self.group.running

    @property
    def kv_tokens(self) -> int:
        """Return the tokens of KV of the running sequences together."""
        return self.group.kv_tokens

    @property
    def has_store(self) -> bool:
        """Return whether what waits has its KV in host memory."""
        return self.form.admission is not self.form.device

    @property
    def has_waiting(self) -> bool:
        """Return whether any sequence is here that does not run."""
        return bool(self.ready or self.queue or self.returning or self.begun)

    @property
    def resident(self) -> int:
        """Return how many sequences run, wait with KV, or are on their way back."""
        return len(self.running) + len(self.ready) + len(self.returning)

    @property
    def is_empty(self) -> bool:
        """Return whether it has no sequence."""
        return not (self.running or self.has_waiting)

    @property
    def arrived(self) -> bool:
        """Return whether KV on its way to the device has come."""
        return self.returning.next_at <= self.now

    @property
    def changes(self) -> int:
        """Return how often a sequence has arrived, was prefilled, left or ended here."""
        return self._changes

    def state(self) -> State:
        """Return the state from which decisions are made."""
        away = len(self.form.admission.away)
        held = len(self.running) + len(self.ready) - away + len(self.returning) + (self.begun is not None)
        return State(
            queued=self.queue,
            ready=SequencesView(self.ready),
            running=len(self.running),
            steps=self._steps,
            request_slots=self.request_slots,
            free_request_slots=self.request_slots - held,
            filling=self._filling,
            changed=self._changes != self._changes_at_boundary,
            returning=len(self.returning),
            queued_tokens=self.queue.tokens,
            begun=self.begun,
        )

    def kv_state(self) -> KVState:
        """Return where KV lies."""
        form = self.form
        return KVState(
            device=form.device,
            admission=form.admission,
            runners=self.group.up_to_date,
            estimate_shared=lambda _: None,
            store_free=form.store_free,
            arrived=self.arrived,
            streams=form.streams,
            interval=self._interval,
        )

    def header(self) -> RankHeader:
        """Return what this rank tells the others before each step."""
        state = self.state()
        waiting = len(self.ready) + len(self.queue) + len(self.returning) + (self.begun is not None)
        return RankHeader(running=len(self.running), waiting=waiting, forked=0, due=rank_is_due(state, self.plan))

    def rank_state(self, *, movable: bool) -> RankState:
        """Return this rank's part of a decision for all ranks. `movable`: whether its sequences may leave it."""
        state, kv = self.state(), self.kv_state()
        ledger = self.form.admission
        if ledger.policy.grows:
            for sequence in islice(state.queued, MOST_QUEUED):
                note_expected(Admission(leader=sequence), ledger.policy)
        can_leave: tuple[list[Movable], list[Movable]] = [], []
        if movable:
            items = (
                [self._item(one) for one in self.ready.values()],
                [self._item(one) for one in self.group.up_to_date()],
            )
            can_leave = self.form.policy.movable(*items, kv, self.plan)
        return RankState.of(state, ledger, self.form.policy.capacity(state, kv, self.plan), can_leave)

    def _item(self, sequence: SequenceState) -> Movable:
        pages, gap = self.form.room(sequence, self.plan)
        return Movable(sequence=sequence, tokens=sequence.kv_tokens, pages=pages, gap=gap)

    def room(self) -> Room:
        """Return what this rank has for waiting sequences."""
        kv, account, active = self.kv_state(), self.form.admission, len(self.running) + len(self.returning)
        return Room(
            active=active,
            rows=min(self.plan.decode.b_moe - active, self.state().free_request_slots),
            pages=device_room(kv, self.plan),
            account_pages=account.free_pages + account.largest_gap,
            largest_gap=account.largest_gap,
            takes=not account.has_waiting,
        )

    def waiters(self, number: int) -> Iterator[Waiter]:
        """Yield the waiting sequences of this rank, the `number`-th of its node, in the order of their turns."""
        device = self.form.device
        for one in list(self.ready.values()):
            pages = pages_to_run(one, device, self.plan)
            stays = self.form.admission is not device and device.holds(one.sequence_id)
            yield Waiter(sequence=one, rank=number, pages=pages, item=None if stays else self._item(one))

    def newly_in_memory(self) -> int:
        """Return the tokens of KV, in all tiers, for which the rank has never used memory before."""
        waiting = sum(one.kv_tokens for one in self.ready.values()) + self.returning.tokens
        tokens = self.form.tokens_in_memory(waiting, self.kv_tokens)
        more = max(0, tokens - self._most_in_memory)
        self._most_in_memory += more
        return more

    # Actions.

    def carry_out(self, action: Action) -> tuple[int, int]:
        """Carry out an action that is not for the device.

        Returns the tokens whose KV is copied to the store before this ends, and those whose copies to the device begin.
        """
        match action:
            case Suspend(sequences=sequences):
                return self._suspend(sequences), 0
            case Evict(sequences=sequences):
                return self.form.leave(sequences), 0
            case Extend(pages=pages):
                for sequence, number in pages:
                    self.form.device.resize(sequence.sequence_id, number)
            case Grow():
                growth.carry_out(action, self.form.admission)
            case Restore(pages=pages):
                return 0, sum(self._restore(sequence, number) for sequence, number in pages)
            case Refill(sequences=sequences):
                self.refill(sequences)
            case StreamDecode(on=on):
                self.form.stream(on=on)
            case BeginInterval() | Idle():
                self.begin_interval()
            case _:
                assert isinstance(action, Sync), f"{type(action).__name__} is not simulated"
        return 0, 0

    def _suspend(self, sequences: Sequence[SequenceState]) -> int:
        for one in sequences:
            self.group.leave(one)
        self.tally.suspensions += len(sequences)
        copied = self.form.leave(sequences)
        for one in sequences:
            if self.form.loses:
                self._queue_again(one)
            else:
                advance(one, Event.SUSPEND, "")
                self._wait(one)
        return copied

    def _queue_again(self, sequence: SequenceState) -> None:
        sequence.lost_tokens = sequence.kv_tokens
        self.form.release(sequence)
        advance(sequence, Event.RETRACT, "")
        self._changes += 1
        self.queue.add_again(sequence, last=self.form.waits_last)

    def _wait(self, sequence: SequenceState) -> None:
        # Ranks that cross the same boundaries compare turns.
        self._waits = max(self._waits + 1, self.boundaries * _TURNS)
        sequence.waits_since = self._waits
        self.ready[sequence.sequence_id] = sequence

    def _restore(self, sequence: SequenceState, pages: int) -> int:
        del self.ready[sequence.sequence_id]
        self.returning.begin(sequence)
        self.tally.restores += 1
        return self.form.restore(sequence, pages)

    def join_arrived(self, *, wait: bool = False) -> float:
        """Combine the sequences whose KV has come into the decode group. Returns the time at which the last one came.

        `wait`: all that are on their way.
        """
        came = self.returning.take(self.now, wait=wait)
        for _, sequence in came:
            self.form.arrive(sequence)
            self._run(sequence)
        return max([self.now, *(at for at, _ in came)])

    def refill(self, sequences: Iterable[SequenceState]) -> None:
        """Combine waiting sequences into the decode group, whose KV lies where decode steps read it."""
        for sequence in sequences:
            del self.ready[sequence.sequence_id]
            self.form.join(sequence)
            self._run(sequence)

    def _run(self, sequence: SequenceState) -> None:
        combine([sequence], Event.COMBINE_DECODE, "")
        self.group.join(sequence)

    def _length(self, name: str) -> int:
        return int(self.requests.outputs[int(name)])

    def begin_interval(self) -> None:
        """End a boundary: steps are counted from here."""
        self._filling = False
        self._steps = 0
        self._changes_at_boundary = self._changes
        self.boundaries += 1
        alive = len(self.running) + len(self.returning) + len(self.ready)
        self._interval = Interval(number=self._interval.number + 1, alive=alive)

    # Passes.

    def prefill(self, action: Prefill) -> Prompts:
        """Admit the units of a group, and return what the pass computes; `prefilled` ends it."""
        self._filling = True
        pairs = again = 0
        pages = action.on_device or (None,) * len(action.units)
        for unit, kept in zip(action.units, pages, strict=True):
            sequence = unit.leader
            self.queue.take(sequence)
            self.form.admit(unit, self.plan, kept)
            combine([sequence], Event.COMBINE_PREFILL, "")
            sequence.computed_tokens = sequence.kv_tokens
            pairs += pairs_of(sequence.kv_tokens)
            self.form.prefilled(sequence)
            again += min(sequence.lost_tokens, sequence.kv_tokens)
        tokens = sum(unit.leader.prefill_rows for unit in action.units)
        self.tally.again += again
        self.tally.prompt_tokens += tokens - again
        return Prompts(count=len(action.units), tokens=tokens, pairs=pairs)

    def prefilled(self, sequences: Iterable[SequenceState]) -> None:
        """Give each prompt that a pass has completed its first token."""
        for sequence in sequences:
            sequence.generated_tokens += 1
            self.tally.output_tokens += 1
            self._changes += 1
            finished = sequence.generated_tokens >= self._length(sequence.sequence_id)
            yield_(sequence, finished=finished, why="")
            if finished:
                self._end(sequence)
            else:
                self._wait(sequence)

    def compute(self, chunk: Chunk) -> Prompts:
        """Compute a chunk of a prompt, whose sequence is taken from the queue with its first one."""
        sequence = chunk.sequence
        if sequence.status is Status.QUEUED:
            self.queue.take(sequence)
            self.form.admit(Admission(leader=sequence), self.plan, None)
            combine([sequence], Event.COMBINE_PREFILL, "")
        end = chunk.start + chunk.tokens
        again = max(0, min(sequence.lost_tokens, end) - chunk.start)
        self.tally.again += again
        self.tally.prompt_tokens += chunk.tokens - again
        sequence.computed_tokens = end
        whole = end >= sequence.kv_tokens
        self.begun = None if whole else sequence
        if whole:
            self.form.prefilled(sequence)
        return Prompts(count=1, tokens=chunk.tokens, pairs=pairs_of(end, chunk.start))

    @property
    def steps_to_boundary(self) -> int:
        """Return the decode steps until a boundary is due whatever happens."""
        return self.plan.boundary_tokens - self._steps

    def decode(self, steps: int, seconds: float) -> None:
        """Let all running sequences generate so many tokens in this time; those that end with the last one leave."""
        self._filling = False
        self._steps += steps
        rows, begun = steps * len(self.running), self._interval
        # Not by dataclasses.replace: this comes with each step of each rank.
        self._interval = Interval(
            number=begun.number, alive=begun.alive, rows=begun.rows + rows, seconds=begun.seconds + seconds
        )
        self.tally.output_tokens += rows
        for sequence in self.group.advance(steps):
            advance(sequence, Event.FINISH, "")
            self._end(sequence)

    def _end(self, sequence: SequenceState) -> None:
        self._changes += 1
        self.tally.finished += 1
        self._ended.append(sequence.generated_tokens)
        self.form.admission.policy.finished(sequence, sequence.generated_tokens)
        self.form.release(sequence)
        if self.on_end is not None:
            self.on_end(sequence)

    def take_ended(self) -> Sequence[int]:
        """Return the lengths of the outputs that have ended here since the last call of this."""
        taken, self._ended = self._ended, array("q")
        return taken

    # Migration.

    def depart(self, sequence: SequenceState) -> None:
        """Let a waiting or running sequence leave this rank with its KV."""
        if self.ready.pop(sequence.sequence_id, None) is None:
            self.group.leave(sequence)
        migrate(sequence, Event.DEPART, "")
        self._changes += 1
        self.form.release(sequence)

    def adopt(self, sequence: SequenceState, *, moved: bool = True) -> None:
        """Take in a sequence that has left another rank, with room that was decided.

        `moved`: whether its KV moves. If not, it has waited in the node's memory, and keeps its turn.
        """
        self.form.take_in(sequence, *self.form.room(sequence, self.plan))
        migrate(sequence, Event.ARRIVE, "")
        self._changes += 1
        if moved:
            self.tally.moved_tokens += sequence.kv_tokens
            self._wait(sequence)
        else:
            self._waits = max(self._waits, sequence.waits_since)
            enter_in_turn(self.ready, sequence, lambda one: self.form.device.holds(one.sequence_id))
