"""Owns a rank's context among the ranks of its engine: what it computes, and how it reaches the other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from sgl_batch.core.topology import RankPart, Topology
from sgl_batch.distributed.rendezvous import Rendezvous
from sgl_batch.distributed.zmq_channel import ZmqChannel
from sgl_batch.sglang_adapter.ranks import new_process_group

# Ranks that start together may be minutes apart: on a busy machine, imports and loading take minutes. The controller
# notices a rank that ends meanwhile, and ends them all. This limit is for a rank that hangs.
_START_TIMEOUT_S = 900.0
# A collective waits this long for a rank that computes. The heartbeat finds a rank that hangs long before.
_COLLECTIVE_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """A rank's number, its part of the topology, and the means to reach the other ranks.

    `rank`: the global one, for control channels, process groups of all ranks, files and messages. `attention_rank` and
    `expert_shard` say what the rank computes.
    `directory`: where the ranks of this engine leave their addresses. Its name identifies the engine.
    `shares_gpu`: there are more ranks than GPUs, so that some ranks share a GPU.
    """

    rank: int
    topology: Topology
    directory: Path
    shares_gpu: bool = False

    @property
    def rendezvous(self) -> Rendezvous:
        """Where the ranks publish what the others need at the start."""
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
        """This rank's number among the ranks of its stage that have sequences."""
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
        """Return the backend of torch.distributed that moves tensors of this device between ranks.

        NCCL makes no group of ranks that share a GPU. Their tensors go through host memory, which gloo moves.
        """
        return "gloo" if device == "cpu" or self.shares_gpu else "nccl"

    def await_published(self, name: str, ranks: Iterable[int]) -> dict[int, str]:
        """Wait until these ranks have published `name` at their start; return its text by rank.

        Raises PeerTimeout, which names the ranks that have not.
        """
        return self.rendezvous.await_all(name, ranks, _START_TIMEOUT_S)

    def process_group(self, name: str, backend: str, ranks: Sequence[int] | None = None) -> Any:
        """Make a process group of these global ranks, or of all, for `name`. Each calls this, in the same order."""
        members = range(self.topology.num_ranks) if ranks is None else ranks
        store = FileStore(str(self.directory / f"store-{name}"), len(members))
        return new_process_group(
            backend,
            PrefixStore(name, store),
            rank=members.index(self.rank),
            world_size=len(members),
            name=name,
            timeout_s=_COLLECTIVE_TIMEOUT_S,
        )

    def channel(self, name: str, messages: Any) -> ZmqChannel[Any]:
        """Make a channel to all other ranks and connect it. Every rank calls this."""
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
