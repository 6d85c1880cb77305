"""Checks the actions that a callback returns before they are carried out, and says what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sgl_batch.core.actions import EndPartition, Hold, Migrate, Partition, PrefillPhase
from sgl_batch.core.arrival_room import ArrivalRoom
from sgl_batch.core.group_view import GroupView
from sgl_batch.core.partition import refusal
from sgl_batch.core.rank_state import Movable, movable_by_name

_REFILL, _LONG_TAIL = (Migrate, PrefillPhase), (Migrate, Partition, EndPartition, Hold)
_MOST_NAMED = 3


class _WrongError(Exception):
    """An action cannot be carried out; the text says which, and why."""


def fault_of(actions: Any, view: GroupView) -> str | None:
    """Return what is wrong with the actions that a callback has returned for this view; None if they can be done."""
    if not isinstance(actions, tuple):
        return f"a value of type {type(actions).__name__}, where it must return a tuple of actions"
    try:
        _check(actions, view)
    except _WrongError as wrong:
        return f"{wrong}"
    return None


def _check(actions: tuple[Any, ...], view: GroupView) -> None:
    kinds = _REFILL if view.waits else _LONG_TAIL
    for action in actions:
        if not isinstance(action, kinds):
            when = "while sequences wait" if view.waits else "when nothing waits"
            allowed = ", ".join(kind.__name__ for kind in kinds)
            raise _WrongError(f"{_named(action)}; {when} it may return {allowed}")
    _check_phase(actions, view)
    _check_moves([action for action in actions if isinstance(action, Migrate)], view)
    moved = {one.sequence_id for action in actions if isinstance(action, Migrate) for one in action.sequences}
    _check_partitions([action for action in actions if isinstance(action, Partition)], view, moved)
    for action in actions:
        if isinstance(action, EndPartition) and action.ranks not in view.partitions:
            raise _WrongError(f"{_named(action)}, and no sequence is partitioned over these ranks")
    held = frozenset[int]().union(*(action.ranks for action in actions if isinstance(action, Hold)))
    _check_held(held, view)


def _check_phase(actions: tuple[Any, ...], view: GroupView) -> None:
    prefill = any(isinstance(action, PrefillPhase) for action in actions)
    if prefill and len(actions) > 1:
        raise _WrongError(f"{len(actions)} actions with PrefillPhase, which stands alone: no sequence moves then")
    if prefill and not view.prefills:
        raise _WrongError("PrefillPhase, and no rank is below --refill-watermark with a prompt in its queue that fits")
    ready = any(rank.state.ready or rank.state.returning for rank in view.ranks)
    if not prefill and view.prefills and not (view.num_running or ready):
        raise _WrongError("no PrefillPhase, and nothing else can be done: all sequences are queued")


def _check_moves(moves: Iterable[Migrate], view: GroupView) -> None:
    rooms = [ArrivalRoom.of(rank, view.plan.page_size) for rank in view.ranks]
    items = [
        {name: item for name, item in movable_by_name(rank).items() if len(item.sequence.ranks) == 1}
        for rank in view.ranks
    ]
    for move in moves:
        if not view.migrates:
            raise _WrongError(f"{_named(move)}, and --migration never lets no sequence move")
        _check_ranks(move, {move.source, move.target}, view)
        if move.source == move.target:
            raise _WrongError(f"{_named(move)}, which is no other rank")
        for sequence in move.sequences:
            item: Movable | None = items[move.source].pop(sequence.sequence_id, None)
            if item is None:
                raise _WrongError(
                    f"{_named(move)}, and rank {move.source} has no sequence {sequence.sequence_id} that may leave it"
                )
            room = rooms[move.target]
            if not room.fits(item):
                takes = f"{sequence.sequence_id} takes {item.new_pages} pages where {room.pages} are free"
                raise _WrongError(f"{_named(move)}, and {takes}, and a request slot where {room.request_slots} are")
            room.take(item)


def _check_partitions(partitions: Iterable[Partition], view: GroupView, moved: set[str]) -> None:
    taken = set[int]()
    for partition in partitions:
        _check_ranks(partition, partition.ranks, view)
        if taken & partition.ranks:
            raise _WrongError(f"{_named(partition)}, and rank {min(taken & partition.ranks)} has another partition")
        taken |= partition.ranks
        why = refusal(partition, view.ranks, view.plan)
        if why is not None:
            raise _WrongError(f"{_named(partition)}, and {why}")
        if any(sequence.sequence_id in moved for sequence in partition.sequences):
            raise _WrongError(f"{_named(partition)}, and one of them moves at the same boundary")


def _check_held(held: frozenset[int], view: GroupView) -> None:
    if held:
        _check_ranks(Hold(ranks=held), held, view)
        if not any(rank.state.running for number, rank in enumerate(view.ranks) if number not in held):
            raise _WrongError(f"{_named(Hold(ranks=held))}, and no other rank has a sequence to decode")
        if set[int]().union(*view.partitions) & held:
            raise _WrongError(f"{_named(Hold(ranks=held))}, some of which decode a partition")


def _check_ranks(action: Any, ranks: Iterable[int], view: GroupView) -> None:
    known = range(len(view.ranks))
    if any(not isinstance(rank, int) or rank not in known for rank in ranks):
        raise _WrongError(f"{_named(action)}, and the ranks are 0 to {len(known) - 1}")


def _named(action: Any) -> str:
    """Return an action in words, with a few of its sequences."""
    kind = type(action).__name__
    names = [one.sequence_id for one in getattr(action, "sequences", ())]
    what = f"{kind} of {', '.join(names[:_MOST_NAMED])}{', ...' if len(names) > _MOST_NAMED else ''}" if names else kind
    if isinstance(action, Migrate):
        return f"{what} from rank {action.source} to rank {action.target}"
    if isinstance(action, Partition | EndPartition | Hold):
        return f"{what} over ranks {', '.join(map(str, sorted(action.ranks)))}"
    return what
