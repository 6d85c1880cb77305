"""Owns the pool of a node: what waits on its ranks is for whichever of them has room. Not where KV lies.

Waiting sequences whose KV is in the node's memory are dealt by the rule of the engine (core/waiting_pool), before the
decision for all ranks. Neither they nor queued ones take time: a queued sequence has no KV, and all ranks of a node
read its memory. The engine's queued sequences stay on the ranks that they came to. Its ranks lease what they need of
one store (core/store_lease); here each has an equal part.
"""

from __future__ import annotations

from collections.abc import Sequence

from sgl_batch.core.plan import Plan
from sgl_batch.core.rank_moves import Move
from sgl_batch.core.waiting_pool import deal_waiting
from sgl_batch.simulator.rank import SimulatedRank


class NodePool:
    """Deals what waits to the ranks of each node. `node_ranks`: so many consecutive ranks are in one node."""

    def __init__(self, node_ranks: int) -> None:
        self._node_ranks = node_ranks

    def deal(self, ranks: Sequence[SimulatedRank], plan: Plan) -> None:
        """Even out the queues of the ranks of each node, and give waiting sequences to ranks that can run them."""
        for start in range(0, len(ranks), self._node_ranks):
            node = ranks[start : start + self._node_ranks]
            _deal_queued(node)
            _deal_waiting(node, plan)

    def is_free(self, move: Move, source: SimulatedRank) -> bool:
        """Return whether a sequence can change its rank without a copy: it waits, with its KV in the node's memory."""
        same_node = move.source // self._node_ranks == move.target // self._node_ranks
        return same_node and source.has_store and move.sequence_id in source.ready


def _deal_queued(node: Sequence[SimulatedRank]) -> None:
    """Give all ranks as many queued sequences; what is over goes to those with the fewest others."""
    lengths = [len(rank.queue) for rank in node]
    total, count = sum(lengths), len(node)
    if max(lengths) - min(lengths) < 2 and not 0 < total < count:
        return
    share, over = divmod(total, count)
    wanted = [share] * count
    for number in sorted(range(count), key=lambda number: node[number].resident)[:over]:
        wanted[number] += 1
    spare = [
        number
        for rank, has, wants in zip(node, lengths, wanted, strict=True)
        for number in rank.queue.give(has - wants)
    ]
    # The last ones of each queue, in the order of their arrival.
    spare.sort(reverse=True)
    for rank, has, wants in zip(node, lengths, wanted, strict=True):
        for _ in range(wants - has):
            rank.queue.add(spare.pop())


def _deal_waiting(node: Sequence[SimulatedRank], plan: Plan) -> None:
    """Give what waits in the node's memory to ranks that can run it, by the rule of core/waiting_pool."""
    if not node[0].has_store:
        return
    dealt = deal_waiting([rank.room() for rank in node], [rank.waiters(number) for number, rank in enumerate(node)])
    for move in dealt.moves:
        sequence = node[move.source].ready[move.sequence_id]
        node[move.source].depart(sequence)
        node[move.target].adopt(sequence, moved=False)
