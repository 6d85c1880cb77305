"""Owns the layout of an engine's ranks: which part of a pass each computes, and which layouts this release runs.

How ranks reach each other, and on which devices they run, is decided elsewhere.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from sgl_batch.errors import ConfigError


class Role(enum.Enum):
    """The halves of its stage's layers that a rank computes."""

    ATTENTION = "attention"
    EXPERTS = "experts"
    BOTH = "attention and experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """One rank's part: a pipeline stage, and in it attention for sequences of its own, a shard of the experts, or both.

    `attention_rank` and `expert_shard` are counted within the stage; None where the rank has no such part.
    """

    stage: int = 0
    attention_rank: int | None = None
    expert_shard: int | None = None

    @property
    def role(self) -> Role:
        """The halves of layers that it computes."""
        if self.attention_rank is None:
            return Role.EXPERTS
        return Role.ATTENTION if self.expert_shard is None else Role.BOTH


@dataclass(frozen=True, slots=True)
class Topology:
    """The part of each rank of an engine, by global rank. All stages have as many attention ranks and expert shards.

    Several ranks of a stage may hold the same shard.
    """

    parts: tuple[RankPart, ...]

    def __post_init__(self) -> None:
        for stage in range(self.num_stages):
            parts = [part for part in self.parts if part.stage == stage]
            attention = sorted(part.attention_rank for part in parts if part.attention_rank is not None)
            shards = {part.expert_shard for part in parts if part.expert_shard is not None}
            assert attention == list(range(self.num_attention_ranks)), f"stage {stage} has attention ranks {attention}"
            assert shards == set(range(self.num_expert_shards)), f"stage {stage} has expert shards {shards}"
            assert all(part.attention_rank is not None or part.expert_shard is not None for part in parts)

    @classmethod
    def uniform(cls, num_ranks: int, *, num_stages: int = 1) -> Topology:
        """Return a layout of `num_ranks` ranks in each stage; the r-th of a stage is attention rank r with shard r."""
        pairs = [(stage, rank) for stage in range(num_stages) for rank in range(num_ranks)]
        return cls(tuple(RankPart(stage=stage, attention_rank=rank, expert_shard=rank) for stage, rank in pairs))

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all stages and roles."""
        return len(self.parts)

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return 1 + max(part.stage for part in self.parts)

    @property
    def num_attention_ranks(self) -> int:
        """Number of attention ranks of each stage: the data-parallel targets of requests."""
        return 1 + max(-1 if part.attention_rank is None else part.attention_rank for part in self.parts)

    @property
    def num_expert_shards(self) -> int:
        """Number of shards into which each stage's experts are cut."""
        return 1 + max(-1 if part.expert_shard is None else part.expert_shard for part in self.parts)

    @property
    def control_rank(self) -> int:
        """The global rank that decides for all at a boundary: the first attention rank of the first stage."""
        return self.rank_of_attention(0)

    def rank_of_attention(self, attention_rank: int, *, stage: int = 0) -> int:
        """Return the global rank of an attention rank."""
        (found,) = self._ranks(lambda part: part.stage == stage and part.attention_rank == attention_rank)
        return found

    def holders(self, expert_shard: int, *, stage: int = 0) -> tuple[int, ...]:
        """Return the global ranks that hold a shard of a stage's experts."""
        return self._ranks(lambda part: part.stage == stage and part.expert_shard == expert_shard)

    def _ranks(self, matches: Callable[[RankPart], bool]) -> tuple[int, ...]:
        return tuple(rank for rank, part in enumerate(self.parts) if matches(part))


def check_runnable(topology: Topology) -> None:
    """Raise ConfigError for a layout that this release does not run, naming the part that it does not run."""
    fault = _unsupported(topology)
    if fault is not None:
        raise ConfigError(
            f"{fault}; in this release all ranks of an engine belong to one stage, and each has attention and an "
            "expert shard of its own: give --tp N --dp N --ep N --enable-dp-attention, and leave --pp-size out"
        )


def _unsupported(topology: Topology) -> str | None:
    if topology.num_stages > 1:
        return f"the layout has {topology.num_stages} pipeline stages"
    for rank, part in enumerate(topology.parts):
        if part.role is not Role.BOTH:
            return f"rank {rank} of the layout has the role {part.role.value!r} alone"
        if (part.attention_rank, part.expert_shard) != (rank, rank):
            return f"rank {rank} of the layout is attention rank {part.attention_rank} with shard {part.expert_shard}"
    return None
