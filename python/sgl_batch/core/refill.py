"""Decides how groups are refilled at a boundary of several ranks: ONREFILLNODE of BatchGen's Algorithm 2, and 5.3.

A rank refills with its own READY and SUSPENDED sequences first, in the order of their turn. Then come inactive
sequences of other ranks, which these cannot run now. Only where that does not bring all ranks to their watermark do the
ranks prefill, all together.

Which sequences of others come depends on where their KV lies. What waits in a store that all ranks read belongs to all
of them: at every boundary it runs where there is room, in the order of turns (`waiting_pool`). Otherwise a sequence of
another rank comes with its KV, and only to a rank that is below its watermark.
"""

from __future__ import annotations

import math
from collections import deque

from sgl_batch.core.actions import Actions, Migrate, PrefillPhase
from sgl_batch.core.arrival_room import ArrivalRoom
from sgl_batch.core.group_view import GroupView
from sgl_batch.core.rank_state import Movable, RankState


def on_refill(view: GroupView) -> Actions:
    """Return the moves of a boundary before which sequences wait, or that the ranks prefill. The default `--on-refill`.

    Prefill that has begun goes on until enough sequences are ready.
    """
    if not view.prefills:
        return (*view.pooled, *view.evening)
    # What has no place on any rank of a common store gets none by a move.
    dealt = view.shares_store or not view.migrates
    begun = any(view.ranks[number].state.filling for number in view.prefills)
    moves = None if dealt or begun else _moves_instead(view)
    return (PrefillPhase(),) if moves is None else moves


def prefill_first(view: GroupView) -> Actions:
    """Prefill as soon as any rank is below its watermark, whatever waits on the others."""
    return (PrefillPhase(),) if view.prefills else (*view.pooled, *view.evening)


def _moves_instead(view: GroupView) -> tuple[Migrate, ...] | None:
    """Return moves of inactive sequences after which no rank is below its watermark; None if there are too few."""
    spare = {number: _spare(rank, view) for number, rank in enumerate(view.ranks) if number not in view.prefills}
    moves: list[Migrate] = []
    for target, kept_pages in view.prefills.items():
        room = ArrivalRoom.of(view.ranks[target], view.plan.page_size, kept_pages=kept_pages)
        for _ in range(_lacking(view.ranks[target], view)):
            # From the rank with the most that it cannot run; of these one of which a copy is here, or the earliest.
            for source in sorted(spare, key=lambda number: (-len(spare[number]), number)):
                fitting = [item for item in spare[source] if room.fits(item)]
                item = next((item for item in fitting if room.holds(item)), fitting[0] if fitting else None)
                if item is not None:
                    break
            else:
                return None
            spare[source].remove(item)
            room.take(item)
            moves.append(Migrate(sequences=(item.sequence,), source=source, target=target))
    return tuple(moves)


def _lacking(rank: RankState, view: GroupView) -> int:
    """Return how many more sequences bring a rank to its watermark."""
    watermark = max(view.plan.refill_watermark * view.plan.decode.b_moe, 1)
    return max(0, math.ceil(watermark - rank.num_resident))


def _spare(rank: RankState, view: GroupView) -> deque[Movable]:
    """Return the waiting sequences that a rank cannot run now and that may leave it, in the order of arrival."""
    room = max(0, view.plan.decode.b_moe - rank.state.running - rank.state.returning)
    waiting = sorted(rank.state.ready, key=lambda sequence: sequence.arrival)
    after = {sequence.sequence_id for sequence in waiting[room:]}
    movable = (item for item in rank.ready if item.sequence.sequence_id in after and len(item.sequence.ranks) == 1)
    return deque(sorted(movable, key=lambda item: item.sequence.arrival))
