"""Owns carrying out the partition of one prompt on a rank: its replica is made, computed with the others, and ends.

core/prompt_partition has the theory, and decides when. The owner sends the tokens; the other ranks reserve pages for
the prompt's KV. Where all can, they compute the prompt together. Otherwise the owner computes it alone, in the same
pass. A replica generates one token, with which SGLang frees its KV, so that nothing is left to end.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from sgl_batch.core.recomputation import note_prefill
from sgl_batch.distributed.channel import Channel
from sgl_batch.managers.rank_messages import PartitionRow
from sgl_batch.managers.sequence_table import SequenceTable
from sgl_batch.metrics.counters import Counters
from sgl_batch.sglang_adapter.moving import prompt_replica, shares_prompt
from sgl_batch.sglang_adapter.scheduling import prefill_batch
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch
from sgl_batch.sglang_adapter.types.requests import Request
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler

# The heartbeat ends a wait for a rank that hangs long before.
_TIMEOUT_S = 1800.0


class PromptMessage(msgspec.Struct, tag="prompt", array_like=True, frozen=True):
    """The tokens of a prompt; none if its owner computes it alone."""

    sequence_id: str
    tokens: list[int]


class RankPrompts:
    """One rank's part in prompts that all ranks compute. `all_done`: as `RankGroup.all_done`."""

    def __init__(
        self,
        scheduler: SGLangScheduler,
        table: SequenceTable,
        channel: Channel[PromptMessage],
        all_done: Callable[[bool], bool],
        counters: Counters,
    ) -> None:
        self._scheduler, self._table, self._channel = scheduler, table, channel
        self._all_done, self._counters = all_done, counters
        self._replica: Request | None = None

    def begin(self, partition: PartitionRow) -> bool:
        """Return whether all ranks compute this prompt in the next pass. The same on all; every rank calls this.

        Raises PeerLost or PeerTimeout when another rank has ended or hangs.
        """
        (name,), (owner,) = partition.sequence_ids, partition.owners
        owns = owner == self._channel.rank
        if owns:
            takes_part = self._send(name, [rank for rank in partition.ranks if rank != owner])
        else:
            takes_part = self._reserve(owner)
        stands = self._all_done(takes_part)
        if owns:
            self._counters.add("prompts_partitioned" if stands else "prompts_not_partitioned")
        elif takes_part:
            self._settle(stands=stands)
        return stands

    def batch(self) -> ScheduleBatch:
        """Return the batch that computes this rank's replica, which has the rows of the owner's batch."""
        replica, self._replica = self._replica, None
        assert replica is not None, "`begin` has made a replica"
        batch = prefill_batch(self._scheduler, [replica], {})
        note_prefill(self._table[replica.rid], 0, batch.extend_lens[0])
        return batch

    def _send(self, name: str, peers: list[int]) -> bool:
        request = self._table.request_named(name)
        shares = shares_prompt(request)
        for peer in peers:
            self._channel.send(peer, PromptMessage(name, list(request.origin_input_ids) if shares else []))
        return shares

    def _reserve(self, owner: int) -> bool:
        """Receive the prompt, and reserve pages for its KV; return whether this rank takes part."""
        received = None
        while received is None:
            received = self._channel.recv([owner], timeout_s=_TIMEOUT_S, awaiting="a prompt that all ranks compute")
        message = received[1]
        if not message.tokens or message.sequence_id in self._table:
            return False
        self._replica = prompt_replica(self._scheduler, message.sequence_id, message.tokens)
        return self._table.expect_replica(self._replica) is None

    def _settle(self, *, stands: bool) -> None:
        assert self._replica is not None, "this rank has reserved pages for a replica"
        if stands:
            self._table.adopt_replica(self._replica)
        else:
            self._table.expect_no_replica(self._replica.rid)
            self._replica = None
