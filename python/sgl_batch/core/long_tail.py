"""Decides about the last sequences of a batch: ONLONGTAIL of BatchGen's Algorithm 2, and 5.3.

It is asked at boundaries before which nothing waits on any rank. Several stragglers are spread over the ranks, data
parallel. Where it pays, they are partitioned: the ranks are cut into as many equal sets as there are stragglers, or
fewer, and those of a set compute its sequences together. One straggler is partitioned over all ranks.

Whether it pays is a matter of modelled cost (`tail_cost`). Without a profile the plan has two limits: how many
sequences are left, and how many tokens one of them is expected to generate yet.
"""

from __future__ import annotations

from sgl_batch.core.actions import Actions, Hold, Migrate
from sgl_batch.core.arrival_room import ArrivalRoom
from sgl_batch.core.group_view import GroupView
from sgl_batch.core.partition import ends_of, refusal, whole_set
from sgl_batch.core.rank_state import Movable
from sgl_batch.core.tail_cost import Straggler, expected_left

# A running sequence that may change its rank, and its rank.
_Placed = tuple[int, Movable]


def on_long_tail(view: GroupView) -> Actions:
    """Return moves that spread the last sequences, or partitions of them. The default `--on-long-tail`.

    A partition goes on until something waits, or until so few sequences are left that larger sets are due.
    """
    size, present = set_size(view), view.partitions
    if present:
        return ends_of(view.ranks) if size > max(map(len, present)) else ()
    return (_partitioned(view, size) if size else None) or view.evening


def hold_level(view: GroupView) -> Actions:
    """Move nothing. Ranks that are ahead of the last one wait for an interval, so that all end at about the same time.

    A rank is ahead if its sequences are expected to end an interval or more before the last of all does.
    """
    ends = {}
    for number, rank in enumerate(view.ranks):
        if rank.state.running and rank.state.running == len(rank.running) and not rank.partition:
            ends[number] = max(expected_left([straggler_of(item) for item in rank.running], view.ended))
    last = max(ends.values(), default=0.0)
    ahead = frozenset(number for number, end in ends.items() if end + view.plan.boundary_tokens <= last)
    return (Hold(ranks=ahead),) if ahead else ()


def straggler_of(item: Movable) -> Straggler:
    """Return a running sequence as the rule about partitions sees it."""
    sequence = item.sequence
    return Straggler(generated=sequence.generated_tokens, most=sequence.max_new_tokens, kv_tokens=item.tokens)


def set_size(view: GroupView) -> int:
    """Return how many ranks are to compute each of the last sequences together; 0 if they are not to be partitioned."""
    running = [straggler_of(item) for _, item in view.running()]
    if not running or len(running) < view.num_running or len(view.ranks) < 2:
        return 0
    if not all(item.replicable for _, item in view.running()) or not all(rank.takes_replicas for rank in view.ranks):
        return 0
    if view.costs is not None:
        best = view.costs.best(running, view.ended, view.plan)
        return 0 if best is None else best.ranks
    plan = view.plan
    if len(running) > plan.partition_below or max(expected_left(running, view.ended)) < plan.partition_least_tokens:
        return 0
    num_ranks = len(view.ranks)
    most_sets = min(len(running), num_ranks // 2)
    return num_ranks // max(count for count in range(1, most_sets + 1) if num_ranks % count == 0)


def _partitioned(view: GroupView, size: int) -> Actions | None:
    """Return the moves that bring each sequence to a rank of its set or, where all are there, the partitions.

    Returns None if a rank lacks the room.
    """
    sets = [range(first, first + size) for first in range(0, len(view.ranks), size)]
    rooms = [ArrivalRoom.of(rank, view.plan.page_size) for rank in view.ranks]
    moves = []
    for ranks, placed in zip(sets, _dealt(view, sets), strict=True):
        for source, item in placed:
            if source in ranks:
                continue
            target = max(ranks, key=lambda rank: rooms[rank].pages)
            if not (view.migrates and rooms[target].fits(item)):
                return None
            rooms[target].take(item)
            moves.append(Migrate(sequences=(item.sequence,), source=source, target=target))
    if moves:
        return tuple(moves)
    partitions = [whole_set(view.ranks, ranks) for ranks in sets]
    wanted = tuple(partition for partition in partitions if partition.sequences)
    return None if any(refusal(one, view.ranks, view.plan) for one in wanted) else wanted


def _dealt(view: GroupView, sets: list[range]) -> list[list[_Placed]]:
    """Return the running sequences by set, evenly. They stay with the set that has their rank as far as that is even.

    Of a set with too many, those with the least KV go.
    """
    dealt = [[placed for placed in view.running() if placed[0] in ranks] for ranks in sets]
    for placed in dealt:
        placed.sort(key=lambda one: (-one[1].tokens, one[1].sequence.sequence_id))
    while len(max(dealt, key=len)) - len(min(dealt, key=len)) > 1:
        min(dealt, key=len).append(max(dealt, key=len).pop())
    return dealt
