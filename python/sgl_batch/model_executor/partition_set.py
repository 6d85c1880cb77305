"""Owns the sets of ranks that compute the same rows together (BatchGen 4.2 and 5.3, partition), from one rank's side.

Which ranks form a set, for which sequences and when, is decided elsewhere. Every rank of a set has the sequences' whole
KV and runs the same passes. Products are split by columns and attention by heads (layers/column_split). Experts stay
where their shards are: a set of all ranks adds up its own partial sums, and in a smaller set the first rank takes part
in the exchange for all. In a set of all ranks they can be split by columns as well (layers/moe/split_experts).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_batch.core.partition_memory import COLUMN_GATHER_BYTES
from sgl_batch.distributed.column_gather import ColumnGather, GroupColumnGather
from sgl_batch.distributed.rank_context import RankContext
from sgl_batch.distributed.shared_memory import shared_regions
from sgl_batch.distributed.shared_memory_column_gather import SharedMemoryColumnGather
from sgl_batch.errors import ConfigError
from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers.column_split import LEAST_BYTES, ColumnSplit
from sgl_batch.layers.moe.split_experts import SplitExperts
from sgl_batch.metrics.counters import Counters

# The heartbeat ends a wait for a lost rank; this is the last resort.
_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSet:
    """A set that this rank belongs to.

    `is_all`: it has all ranks of the engine, and so all experts. `experts`: this rank's columns of all experts; None if
    each rank computes its own experts.
    """

    split: ColumnSplit
    is_all: bool
    experts: SplitExperts | None = None


class PartitionSets:
    """Makes the sets that this rank belongs to, each once.

    `through_memory`: whether the ranks of a set gather columns through memory that they share, and not over gloo.
    `least_bytes`: as in ColumnSplit. `split_experts`: makes this rank's columns of all experts, if they are split.
    """

    def __init__(
        self,
        rank_context: RankContext,
        counters: Counters,
        *,
        device: str,
        through_memory: bool,
        least_bytes: int = LEAST_BYTES,
        split_experts: Callable[[ColumnSplit], SplitExperts] | None = None,
    ) -> None:
        self._split_experts = split_experts
        self._rank_context, self._counters = rank_context, counters
        self._device, self._through_memory, self._least_bytes = device, through_memory, least_bytes
        self._made: dict[tuple[int, ...], PartitionSet] = {}

    def of(self, ranks: Sequence[int]) -> PartitionSet:
        """Return the set of these attention ranks, in ascending order, this one among them.

        It is collective: every rank of the set calls this before the same passes.

        Raises:
            ConfigError: This machine cannot share passes among ranks.
        """
        named, own = tuple(ranks), self._rank_context.attention_rank
        assert list(named) == sorted(set(named)), f"a set has its ranks in ascending order, not {named}"
        assert own in named, f"rank {own} is not in the set {named}"
        if named not in self._made:
            self._check()
            split = ColumnSplit(self._gather(named), self._counters, least_bytes=self._least_bytes)
            is_all = len(named) == self._rank_context.topology.num_attention_ranks
            experts = self._split_experts(split) if is_all and self._split_experts is not None else None
            self._made[named] = PartitionSet(split=split, is_all=is_all, experts=experts)
        made = self._made[named]
        if made.experts is not None:
            made.experts.prepare()
        return made

    @property
    def can_be_made(self) -> bool:
        """Whether this machine can share passes among ranks."""
        return self._device == "cpu" and native_kernels() is not None

    def _check(self) -> None:
        if not self.can_be_made:
            raise ConfigError(
                f"ranks share the passes of a sequence on CPUs with the native kernels; this rank computes on "
                f"{self._device} {'with' if native_kernels() else 'without'} them: do not partition sequences"
            )

    def _gather(self, ranks: tuple[int, ...]) -> ColumnGather:
        name = "partition-" + "-".join(map(str, ranks))
        topology = self._rank_context.topology
        group: Any = self._rank_context.process_group(name, "gloo", [topology.rank_of_attention(one) for one in ranks])
        if not self._through_memory:
            return GroupColumnGather(group)
        kernels = native_kernels()
        assert kernels is not None, "checked before"
        regions = shared_regions(group, COLUMN_GATHER_BYTES)
        return SharedMemoryColumnGather(regions, group.rank(), kernels, timeout_s=_TIMEOUT_S)
