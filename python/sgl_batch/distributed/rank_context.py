"""Owns one rank's place among the ranks of its engine: its part, and how it reaches the others; not what they say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from sgl_batch.core.topology import RankPart, Topology
from sgl_batch.distributed.rendezvous import Rendezvous
from sgl_batch.distributed.zmq_channel import ZmqChannel
from sgl_batch.sglang_adapter.ranks import new_process_group

# Ranks that start together may be far apart in time: on a busy machine, imports and loading take minutes. One that ends
# meanwhile is noticed by the controller, which ends them all; this is for one that hangs.
_START_TIMEOUT_S = 900.0
# A collective waits this long for a rank that computes; one that hangs is found by its heartbeat long before.
_COLLECTIVE_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """`rank`: the global one, for control channels, process groups of all ranks, files and messages. What the rank
    computes is said by its `attention_rank` and its `expert_shard`.

    `directory`: where the ranks of this engine leave their addresses; it names the engine as well.
    `shares_gpu`: there are more ranks than GPUs, so that some have the same one.
    """

    rank: int
    topology: Topology
    directory: Path
    shares_gpu: bool = False

    @property
    def rendezvous(self) -> Rendezvous:
        """Where the ranks leave what the others need."""
        return Rendezvous(self.directory)

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [rank for rank in range(self.topology.num_ranks) if rank != self.rank]

    @property
    def part(self) -> RankPart:
        """What this rank computes."""
        return self.topology.parts[self.rank]

    @property
    def attention_rank(self) -> int:
        """This rank's number among those of its stage that have sequences."""
        found = self.part.attention_rank
        assert found is not None, f"rank {self.rank} has no attention"
        return found

    @property
    def expert_shard(self) -> int:
        """Which shard of its stage's experts this rank holds."""
        found = self.part.expert_shard
        assert found is not None, f"rank {self.rank} holds no experts"
        return found

    def backend(self, device: str) -> str:
        """Which backend of torch.distributed moves what lies on this device between ranks.

        NCCL makes no group of ranks that share a GPU; gloo moves host memory, through which theirs goes.
        """
        return "gloo" if device == "cpu" or self.shares_gpu else "nccl"

    def await_published(self, name: str, ranks: Iterable[int]) -> dict[int, str]:
        """What these ranks have published under `name` when they start; PeerTimeout names one that hangs."""
        return self.rendezvous.await_all(name, ranks, _START_TIMEOUT_S)

    def process_group(self, name: str, backend: str) -> Any:
        """A process group of its own for `name`; every rank calls this, in the same order."""
        store = FileStore(str(self.directory / f"store-{name}"), self.topology.num_ranks)
        return new_process_group(
            backend,
            PrefixStore(name, store),
            rank=self.rank,
            world_size=self.topology.num_ranks,
            name=name,
            timeout_s=_COLLECTIVE_TIMEOUT_S,
        )

    def channel(self, name: str, messages: Any) -> ZmqChannel[Any]:
        """A channel to all other ranks, connected; every rank calls this."""
        channel: ZmqChannel[Any] = ZmqChannel(
            rank=self.rank,
            messages=messages,
            run_id=f"{self.directory.name}-{name}",
            path=self.directory / f"{name}-{self.rank}",
            send_timeout_s=_START_TIMEOUT_S,
        )
        self.rendezvous.publish(f"{name}-endpoint", self.rank, channel.endpoint)
        channel.connect(self.await_published(f"{name}-endpoint", range(self.topology.num_ranks)))
        return channel
