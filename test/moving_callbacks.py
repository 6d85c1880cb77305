"""Callbacks for several ranks, as a user writes them. Engines find them by name, since this folder is on the path."""

from __future__ import annotations

from sgl_batch.core.actions import Actions, Hold, Migrate, PrefillPhase
from sgl_batch.core.group_view import GroupView


def rotate(view: GroupView) -> Actions:
    """Move all that fits to the next rank, at every boundary at which no rank must prefill."""
    if view.prefills:
        return (PrefillPhase(),)
    moves: list[Migrate] = []
    for source, rank in enumerate(view.ranks):
        target = (source + 1) % len(view.ranks)
        to = view.ranks[target]
        slots, pages = to.state.free_request_slots, 0 if to.has_waiting else to.free_pages
        for item in (*rank.ready, *rank.running):
            needed = item.pages + item.gap
            if slots and needed <= pages:
                slots, pages = slots - 1, pages - needed
                moves.append(Migrate(sequences=(item.sequence,), source=source, target=target))
    return tuple(moves)


def hold_all_but_one(view: GroupView) -> Actions:
    """Hold all ranks but one, another one as tokens are generated."""
    numbers = [number for number, rank in enumerate(view.ranks) if rank.state.running]
    tokens = sum(item.sequence.generated_tokens for _, item in view.running())
    keep = numbers[tokens // view.plan.boundary_tokens % len(numbers)]
    held = frozenset(number for number in numbers if number != keep)
    return (Hold(ranks=held),) if held else ()
