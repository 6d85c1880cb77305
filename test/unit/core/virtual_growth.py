"""A rank whose reservations grow, without an engine: `decide` decides, and every promise is checked after each action.

KV lies on the device alone, or in an inclusive store, from which runners have a part of it on the device.
"""

from __future__ import annotations

import json

from sequence_builders import sequence

from sgl_batch.core.actions import (
    Action,
    BeginInterval,
    Extend,
    Grow,
    Idle,
    Join,
    Prefill,
    Refill,
    Restore,
    Step,
    Suspend,
    Sync,
)
from sgl_batch.core.admission import reserve
from sgl_batch.core.admission_policy import AdmissionPolicy
from sgl_batch.core.coroutine import Event, advance
from sgl_batch.core.decide import decide
from sgl_batch.core.decision_record import Observed
from sgl_batch.core.growth import carry_out
from sgl_batch.core.kv_policy import Overflowing
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_boundary import State
from sgl_batch.core.page_ledger import PageLedger, pages_for
from sgl_batch.core.plan import Plan
from sgl_batch.core.sequence import SequenceState, Status
from sgl_batch.core.store_policies import Inclusive


class VirtualGrowth:
    """`lengths`: how many tokens each sequence will generate, which no decision sees.

    `store_pages`: of an inclusive store; None without one. `overflow_pages`: to which sequences can give way without a
    store. `restore_steps`: decode steps that KV takes to come back.
    """

    def __init__(
        self,
        pages: int,
        plan: Plan,
        policy: AdmissionPolicy,
        *,
        store_pages: int | None = None,
        overflow_pages: int = 0,
        restore_steps: int = 2,
    ) -> None:
        self.overflow_pages, self.overflowed = overflow_pages, 0
        self.plan, self.restore_steps = plan, restore_steps
        self.account = PageLedger(pages if store_pages is None else store_pages, plan.page_size, policy=policy)
        self.device: PageLedger = self.account if store_pages is None else PageLedger(pages, plan.page_size)
        self.has_store = store_pages is not None
        self.kv_policy = Inclusive() if self.has_store else Overflowing()
        self.lengths: dict[str, int] = {}
        self.queue: list[SequenceState] = []
        self.ready: dict[str, SequenceState] = {}
        self.running: list[SequenceState] = []
        self.restoring: list[tuple[SequenceState, int]] = []
        self.finished: list[SequenceState] = []
        self.records: list[dict] = []
        self.steps = self.suspensions = self.lent = self.most_running = self.total_steps = 0
        self.admitted = -1
        self._changed = True

    def add(self, *, prompt: int, new: int, length: int) -> None:
        """A sequence arrives that will generate `length` of at most `new` tokens."""
        made = sequence(len(self.lengths), prompt=prompt, new=new)
        self.lengths[made.sequence_id] = length
        self.queue.append(made)
        self._changed = True

    @property
    def busy(self) -> bool:
        return bool(self.queue or self.ready or self.running or self.restoring)

    def run(self) -> None:
        """Until all have finished."""
        while self.busy:
            self.step()

    def step(self) -> None:
        """One forward pass, and all that is decided before it."""
        for _ in range(1000):
            for action in self._decide():
                if self._do(action):
                    self._conserve()
                    return
            self._conserve()
        raise AssertionError("a decision is repeated without end")

    def _decide(self) -> tuple[Action, ...]:
        arrived = bool(self.restoring) and self.restoring[0][1] <= 0
        state = State(
            queued=list(self.queue),
            ready=list(self.ready.values()),
            running=len(self.running),
            steps=self.steps,
            request_slots=1000,
            free_request_slots=1000,
            filling=False,
            changed=self._changed,
            returning=len(self.restoring),
        )
        kv = KVState(
            device=self.device,
            admission=self.account,
            runners=lambda: list(self.running),
            estimate_shared=lambda _: None,
            arrived=arrived,
        )
        observed = Observed(state, kv)
        actions = decide(observed.state, observed.kv, self.plan, self.kv_policy)
        record = observed.record(self.plan, self.kv_policy.name, actions)
        self.records.append(json.loads(json.dumps(record)))
        return actions

    def _do(self, action: Action) -> bool:
        """Whether this was a forward pass, or there is nothing to do."""
        match action:
            case Grow(borrower=borrower):
                carry_out(action, self.account)
                self.lent += borrower is not None
            case Suspend(sequences=sequences):
                self._suspend(sequences)
            case Extend(pages=pages):
                for one, number in pages:
                    self.device.resize(one.sequence_id, number)
            case Restore(pages=pages):
                for one, number in pages:
                    whole = self.device.whole_pages(one)
                    self.device.reserve(one.sequence_id, number, whole=whole)
                    self.restoring.append((self.ready.pop(one.sequence_id), self.restore_steps))
            case Refill(sequences=sequences):
                for one in sequences:
                    self._combine(self.ready.pop(one.sequence_id))
            case Join(wait=wait):
                came = self.restoring if wait else [each for each in self.restoring if each[1] <= 0]
                self.restoring = [each for each in self.restoring if each not in came]
                for one, _ in came:
                    self._combine(one)
            case BeginInterval():
                self.steps, self._changed = 0, False
            case Prefill(units=units):
                self._prefill(units)
                return True
            case Step():
                self._decode()
                return True
            case Idle():
                assert not self.busy, "sequences wait, and nothing is done for them"
                return True
            case Sync():
                pass
            case _:
                raise AssertionError(f"{action} was not to be expected")
        return False

    def _suspend(self, sequences: tuple[SequenceState, ...]) -> None:
        most = max((s.generated_tokens for s in self.running if s not in sequences), default=0)
        for one in sequences:
            borrows = self.account.borrower is not None
            assert borrows or one.generated_tokens >= most, "the most decoded are suspended first"
            self.running.remove(one)
            advance(one, Event.SUSPEND, "test")
            self.ready[one.sequence_id] = one
            if self.has_store:
                self.device.release(one.sequence_id)
            elif self._used_overflow + pages_for(one.kv_tokens, self.plan.page_size) <= self.overflow_pages:
                self.account.leave(one.sequence_id)
                self.overflowed += 1
        self.suspensions += len(sequences)

    @property
    def _used_overflow(self) -> int:
        away = [*self.ready.values(), *(one for one, _ in self.restoring)]
        kept = (one for one in away if one.sequence_id in self.account.away)
        return sum(pages_for(one.kv_tokens, self.plan.page_size) for one in kept)

    def _combine(self, one: SequenceState) -> None:
        if one.sequence_id in self.account.away:
            self.account.come_back(one.sequence_id)
        advance(one, Event.COMBINE_DECODE, "test")
        self.running.append(one)

    def _prefill(self, units: tuple) -> None:
        assert not self.account.has_waiting, "those that wait for pages come first"
        for unit in units:
            one = unit.leader
            assert one is self.queue.pop(0), "nobody passes the head of the queue"
            assert one.status is Status.QUEUED, "no prompt is computed twice"
            reserve(unit, self.account, held=0, new=0, plan=self.plan)
            advance(one, Event.COMBINE_PREFILL, "test")
            one.generated_tokens = 1
            advance(one, Event.YIELD_PREFILLED, "test")
            self.ready[one.sequence_id] = one
            if self.lengths[one.sequence_id] <= 1:
                self._end(self.ready.pop(one.sequence_id), Event.ABORT)
        self._changed = True

    def _decode(self) -> None:
        self.restoring = [(one, left - 1) for one, left in self.restoring]
        self.steps += 1
        self.total_steps += 1
        self.most_running = max(self.most_running, len(self.running))
        for one in list(self.running):
            one.generated_tokens += 1
            if one.generated_tokens >= self.lengths[one.sequence_id]:
                self.running.remove(one)
                self._end(one, Event.FINISH)

    def _end(self, one: SequenceState, event: Event) -> None:
        advance(one, event, "test")
        if self.account.holds(one.sequence_id):
            self.account.release(one.sequence_id)
        self.account.away.discard(one.sequence_id)
        if self.has_store and self.device.holds(one.sequence_id):
            self.device.release(one.sequence_id)
        self.account.policy.finished(one, one.generated_tokens)
        self.finished.append(one)
        self._changed = True

    def abort(self, one: SequenceState) -> None:
        """A sequence that waits or runs ends."""
        if one in self.running:
            self.running.remove(one)
        else:
            del self.ready[one.sequence_id]
        self._end(one, Event.ABORT)

    def _conserve(self) -> None:
        account, size = self.account, self.plan.page_size
        alive = [*self.running, *self.ready.values(), *(one for one, _ in self.restoring)]
        here = [one for one in alive if account.holds(one.sequence_id) or one.sequence_id not in account.away]
        used = {one.sequence_id: pages_for(one.kv_tokens, size) for one in here}
        assert self._used_overflow <= self.overflow_pages
        assert used.keys() == account.reservations().keys()
        assert sum(used.values()) <= account.total_pages, "pages never run out"
        for name, pages in used.items():
            limit = account.whole_need(name) if name == account.borrower else account.held(name)
            assert pages <= limit, f"{name} uses {pages} pages of {limit}"
        assert account.reserved_pages == sum(account.reservations().values())
        assert account.reserved_pages + account.largest_gap <= account.total_pages, "any one can grow to its end"
        assert account.stalled.keys() <= self.ready.keys(), "whoever waits for pages of the account does not run"
        assert account.borrower not in account.stalled
        if self.has_store:
            on_device = {one.sequence_id for one in (*self.running, *(one for one, _ in self.restoring))}
            assert self.device.reservations().keys() == on_device
            for one in self.running:
                assert pages_for(one.kv_tokens, size) <= self.device.held(one.sequence_id)
