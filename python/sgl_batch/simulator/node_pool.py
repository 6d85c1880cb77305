"""Owns the pool of a node: what waits on its ranks is for whichever of them has room. Not where KV lies.

The engine does not do this yet: its ranks keep the sequences that were dealt to them, and only migration, as core/
decides it, moves some at a boundary. Here queued sequences, and waiting ones whose KV is in the node's memory, are
dealt anew before that decision. Neither takes time: a queued sequence has no KV, and all ranks of a node read its
memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from sgl_batch.core.plan import Plan
from sgl_batch.core.rank_moves import Move
from sgl_batch.simulator.rank import SimulatedRank


class NodePool:
    """Deals what waits to the ranks of each node. `node_ranks`: so many consecutive ranks are in one node."""

    def __init__(self, node_ranks: int) -> None:
        self._node_ranks = node_ranks

    def deal(self, ranks: Sequence[SimulatedRank], plan: Plan) -> None:
        """Even out the queues of the ranks of each node, and give waiting sequences to ranks that have none."""
        for start in range(0, len(ranks), self._node_ranks):
            node = ranks[start : start + self._node_ranks]
            _deal_queued(node)
            _deal_ready(node, plan)

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


def _deal_ready(node: Sequence[SimulatedRank], plan: Plan) -> None:
    """Give ranks that could run more and have nothing that waits some of what waits elsewhere, from the last on."""
    if not node[0].has_store or node[0].form.admission.policy.grows:
        return
    for target in node:
        while not target.ready and target.resident < plan.decode.b_moe:
            source = max(node, key=lambda rank: len(rank.ready))
            if len(source.ready) < 2:
                return
            sequence = source.ready[next(reversed(source.ready))]
            pages, _ = target.form.room(sequence, plan)
            if not target.form.admission.fits(pages):
                break
            source.depart(sequence)
            target.adopt(sequence, moved=False)
