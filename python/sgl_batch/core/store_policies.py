"""Decides at a boundary where KV lies with a host KV store: the inclusive, the exclusive and the streamed policy.

`residency` decides which sequences keep pages of the device, `decode_streaming` whether streamed decode pays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, takewhile

from sgl_batch.core.actions import (
    Action,
    Actions,
    BeginInterval,
    Evict,
    Extend,
    Idle,
    Join,
    PagesOf,
    Prefill,
    Refill,
    Restore,
    StreamDecode,
    Suspend,
    Sync,
)
from sgl_batch.core.admission import Admission
from sgl_batch.core.decode_streaming import StreamingChoice
from sgl_batch.core.exclusive import TierCapacity, stays_on_device
from sgl_batch.core.growth import GrowthTrial, extend_waiting
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_boundary import State
from sgl_batch.core.page_ledger import pages_for
from sgl_batch.core.plan import Plan
from sgl_batch.core.rank_state import Movable
from sgl_batch.core.residency import Residency, decide_residency, pages_to_run
from sgl_batch.core.sequence import SequenceState

_IDLE: Actions = (Sync(wait=True), Idle())


def _may_run(state: State, kv: KVState, plan: Plan) -> tuple[Sequence[SequenceState], GrowthTrial | None]:
    """Return the waiting sequences that may run by their reservations, and the trial that has extended these."""
    if not kv.admission.policy.grows:
        return state.ready, None
    room = max(0, plan.decode.b_moe - state.running - state.returning)
    trial, found = extend_waiting(state.ready, kv.admission, plan, most=room)
    return found, trial


def _growth(trial: GrowthTrial | None, coming: Iterable[SequenceState]) -> tuple[Action, ...]:
    """Return the action that extends the reservations of sequences that come back, if that takes one."""
    return () if trial is None else trial.grow(coming)


def _residency(state: State, waiting: Sequence[SequenceState], kv: KVState, plan: Plan) -> Residency:
    return decide_residency(
        kv.runners(),
        waiting,
        kv.device,
        plan,
        prompts=kv.prompts,
        pages_of=kv.pages_of,
        restoring=state.returning,
    )


def _leaving(turn: Residency) -> list[Action]:
    """Return the actions that take device pages from sequences, and give running sequences theirs."""
    actions: list[Action] = [Sync()]
    if turn.suspend:
        actions.append(Suspend(sequences=turn.suspend, why="pages of the device lack"))
    if turn.evict:
        actions.append(Evict(sequences=turn.evict))
    if turn.extend:
        actions.append(Extend(pages=turn.extend))
    return actions


def _coming(actions: list[Action], restore: PagesOf, *, waits: bool) -> Actions:
    """Return these actions, then those that bring sequences back. `waits`: the rank has no rows, and waits for them."""
    if restore:
        actions.append(Restore(pages=restore))
    if waits:
        actions.append(Join(wait=True))
    return (*actions, BeginInterval())


class Inclusive:
    """Every full page of KV is written to the store, so that suspending a sequence copies only its last page."""

    name = "inclusive"
    is_local = True

    def capacity(self, state: State, kv: KVState, plan: Plan) -> None:
        """Return None: every prompt goes to the store, and the account of admission is the store's."""

    def prefill(self, units: tuple[Admission, ...], state: State, kv: KVState, plan: Plan) -> Prefill:
        return Prefill(units=units)

    def at_boundary(self, state: State, kv: KVState, plan: Plan, *, others_run: bool = False) -> Actions:
        waiting, trial = _may_run(state, kv, plan)
        turn = _residency(state, waiting, kv, plan)
        returning = state.returning + len(turn.restore)
        runs = state.running > len(turn.suspend)
        if not (runs or returning):
            return _IDLE
        growth = _growth(trial, (sequence for sequence, _ in turn.restore))
        return _coming([*growth, *_leaving(turn)], turn.restore, waits=returning > 0 and not (runs or others_run))

    def movable(
        self, ready: list[Movable], running: list[Movable], kv: KVState, plan: Plan
    ) -> tuple[list[Movable], list[Movable]]:
        return ready, running


class Exclusive:
    """A page of KV lies on the device or in the store, and all pages of a sequence move together.

    `to_store`: whether prompts can be computed on their way to the store; if not, all are computed on the device.
    """

    is_local = True

    def __init__(self, *, to_store: bool = True) -> None:
        self.name = "exclusive" if to_store else "exclusive on device"
        self._to_store = to_store

    def capacity(self, state: State, kv: KVState, plan: Plan) -> TierCapacity:
        on_device = sum(1 for _ in takewhile(lambda s: kv.device.holds(s.sequence_id), state.ready))
        grow = sum(pages_to_run(s, kv.device, plan) - kv.device.held(s.sequence_id) for s in kv.runners())
        room = max(0, kv.device.free_pages - grow)
        device = None if on_device < len(state.ready) else room
        return TierCapacity(device=device, store=kv.store_free, to_store=self._to_store)

    def prefill(self, units: tuple[Admission, ...], state: State, kv: KVState, plan: Plan) -> Prefill:
        if not stays_on_device(units, self.capacity(state, kv, plan), kv.admission, plan):
            assert self._to_store, "prompts are chosen as far as they have room on the device"
            return Prefill(units=units)
        return Prefill(units=units, on_device=tuple(pages_to_run(unit.leader, kv.device, plan) for unit in units))

    def at_boundary(self, state: State, kv: KVState, plan: Plan, *, others_run: bool = False) -> Actions:
        """See KVPolicy. If leaving sequences need store blocks of sequences on their way back, wait for these first."""
        turn = _residency(state, state.ready, kv, plan)
        leave = sum(pages_for(s.kv_tokens, plan.page_size) for s in (*turn.suspend, *turn.evict))
        if state.returning and leave > kv.store_free:
            return (Join(wait=True),)
        stayed = [(s, pages) for s, pages in turn.restore if kv.device.holds(s.sequence_id)]
        away = turn.restore[len(stayed) :]
        returning, runs = state.returning + len(away), state.running + len(stayed) > len(turn.suspend)
        if not (runs or returning):
            return _IDLE
        actions = _leaving(turn)
        if stayed:
            actions += [Extend(pages=tuple(stayed)), Refill(sequences=tuple(s for s, _ in stayed))]
        return _coming(actions, away, waits=returning > 0 and not (runs or others_run))

    def movable(
        self, ready: list[Movable], running: list[Movable], kv: KVState, plan: Plan
    ) -> tuple[list[Movable], list[Movable]]:
        """Return the waiting sequences in the store, and as many running ones as have room there."""
        free, leaving = kv.store_free, []
        for item in sorted(running, key=lambda item: item.tokens):
            free -= pages_for(item.tokens, plan.page_size)
            if free >= 0:
                leaving.append(item)
        return [item for item in ready if not kv.device.holds(item.sequence.sequence_id)], leaving


class Streamed:
    """Decode steps copy KV from the inclusive store to the device by layer and sub-batch (BatchGen 5.3).

    The group is then as large as the store, and running sequences hold no pages of the device. Without a `choice` every
    interval is streamed; else the choice decides for each interval.
    """

    is_local = True

    def __init__(self, choice: StreamingChoice | None = None) -> None:
        self.name = "streamed" if choice is None else "streamed by choice"
        self._choice, self._resident = choice, Inclusive()
        self._noted = -1

    def capacity(self, state: State, kv: KVState, plan: Plan) -> None:
        """Return None, as for any inclusive store."""

    def prefill(self, units: tuple[Admission, ...], state: State, kv: KVState, plan: Plan) -> Prefill:
        return Prefill(units=units)

    def at_boundary(self, state: State, kv: KVState, plan: Plan, *, others_run: bool = False) -> Actions:
        streams = self._wanted(state, kv)
        if streams != kv.streams:
            if state.returning:
                return (Join(wait=True),)
            runners = tuple(kv.runners())
            why = "its KV is streamed from now on" if streams else "its KV is no longer streamed"
            suspend = (Suspend(sequences=runners, why=why),) if runners else ()
            return (*suspend, StreamDecode(on=streams))
        if not streams:
            return self._resident.at_boundary(state, kv, plan, others_run=others_run)
        if kv.choices:
            return self._bring_choices(kv, plan)
        waiting, trial = _may_run(state, kv, plan)
        joining = tuple(islice(waiting, max(0, plan.decode.b_moe - state.running)))
        if not (joining or state.running):
            return _IDLE
        refill = (Refill(sequences=joining),) if joining else ()
        return (*_growth(trial, joining), Sync(), *refill, BeginInterval())

    def _wanted(self, state: State, kv: KVState) -> bool:
        """Return whether the coming interval is streamed, by measurements of earlier ones."""
        if self._choice is None:
            return kv.streams
        interval, alive = kv.interval, state.running + len(state.ready)
        if interval.rows and interval.number > self._noted:
            self._noted = interval.number
            self._choice.note(interval.alive, streamed=kv.streams, rows=interval.rows, seconds=interval.seconds)
        fits = kv.admission.reserved_pages <= kv.device.total_pages
        return self._choice.choose(alive, fits=fits)

    @staticmethod
    def _bring_choices(kv: KVState, plan: Plan) -> Actions:
        """Restore choices, which compute their prompt's last token in device pages, of which running ones hold none."""
        turn = decide_residency([], kv.choices, kv.device, plan, prompts=kv.prompts, pages_of=kv.pages_of)
        return (Sync(), Restore(pages=turn.restore), Join(wait=True))

    def movable(
        self, ready: list[Movable], running: list[Movable], kv: KVState, plan: Plan
    ) -> tuple[list[Movable], list[Movable]]:
        return ready, running
