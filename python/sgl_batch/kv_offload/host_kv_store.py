"""Owns the store tier: blocks of one page each, in memory or in a file, shared by the ranks of one machine.

A block is stored to in two phases:

    FREE -- prepare_store --> WRITING -- complete_store --> READY -- free of the last reference --> FREE
                              copies to it                  copies from it, share; copies to it
                                                            while it has one reference

Every reference to a block belongs to a rank. What is stored, and when a block is freed, is decided elsewhere; a copy
engine moves the data. The native library and its messages call a block a slot.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sgl_batch.errors import ConfigError
from sgl_batch.kernel_loader import kv_store_kernels
from sgl_batch.kv_offload.rank_process import is_running, process_start
from sgl_batch.kv_offload.store_errors import StoreFault, faults
from sgl_batch.kv_offload.store_files import StoreFiles, path_for_others
from sgl_batch.kv_offload.store_geometry import StoreGeometry
from sgl_batch.memory.free_memory import machine_bytes

if TYPE_CHECKING:
    from types import TracebackType

Indices = torch.Tensor | Sequence[int]
"""Numbers of blocks or of device pages: int64 [N], or a sequence of integers."""


def as_indices(numbers: Indices) -> torch.Tensor:
    """Return block or page numbers as the native library takes them: int64 [N], contiguous, on the host."""
    return torch.as_tensor(numbers, dtype=torch.int64).cpu().contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """What another rank of the machine needs to join a store; valid while the rank that published it is alive."""

    table_path: str
    data_path: str
    file_name: str
    num_blocks: int
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """How many blocks are in each state, of all ranks together."""

    free: int
    writing: int
    ready: int
    recoveries: int
    """How often a rank died in the middle of a change, and another rank rebuilt the table."""

    @property
    def used(self) -> int:
        return self.writing + self.ready


class HostKVStore:
    """One rank's end of a store. One rank calls `create`, the others call `join`. Any thread may call its methods.

    A call with several blocks changes all of them, or raises StoreFault and changes none. A rank that dies never blocks
    the others, even in the middle of a call. The blocks that it held stay taken until `reclaim`, or until a new process
    joins as that rank.
    """

    def __init__(
        self, files: StoreFiles, geometry: StoreGeometry, *, num_blocks: int, num_ranks: int, rank: int, create: bool
    ) -> None:
        """Open the store over `files`, which this object closes. Callers use `create` and `join`."""
        self.geometry, self.num_blocks, self.num_ranks, self.rank = geometry, num_blocks, num_ranks, rank
        self._files = files
        try:
            with faults():
                # The native library's kv_store.Store; the copy engines use it too.
                self.handle: Any = kv_store_kernels().open_store(
                    files.table,
                    create=create,
                    geometry=geometry.numbers(num_blocks),
                    num_ranks=num_ranks,
                    rank=rank,
                    data_fd=-1 if files.data is None else files.data,
                    file_name=files.name,
                )
                self._enter()
        except RuntimeError as error:
            files.close()
            raise ConfigError(
                f"the system refuses a host KV store of {num_blocks * geometry.block_bytes} bytes ({error}): name a "
                "smaller one (--kv-store-bytes), or lift the limit on address space (ulimit -v)"
            ) from error
        except BaseException:
            files.close()
            raise

    @classmethod
    def create(
        cls,
        geometry: StoreGeometry,
        *,
        num_bytes: int,
        num_ranks: int = 1,
        rank: int = 0,
        directory: Path | None = None,
    ) -> HostKVStore:
        """Create a store and enter it as `rank`.

        Memory, or room on the disk, is claimed when a block is first written.

        Args:
            geometry: the sizes of a page; every pool that is copied to this store has the same.
            num_bytes: the most that the blocks take; the store has `num_bytes // geometry.block_bytes` of them.
            num_ranks: the ranks of this machine that can join.
            rank: this rank, 0 to `num_ranks` - 1.
            directory: where to keep the blocks in an unnamed file; None keeps them in memory.

        Raises:
            ConfigError: no page fits, there is no room, or the native kernels are missing.
        """
        kv_store_kernels()
        num_blocks = num_bytes // geometry.block_bytes
        if num_blocks < 1:
            raise ConfigError(
                f"a host KV store of {num_bytes} bytes (--kv-store-bytes) holds no page: one takes "
                f"{geometry.block_bytes} bytes in all {geometry.num_layers} layers; name a larger store"
            )
        memory_bytes = machine_bytes()
        if directory is None and num_bytes > memory_bytes:
            raise ConfigError(
                f"a host KV store of {num_bytes} bytes (--kv-store-bytes) is larger than the machine's memory of "
                f"{memory_bytes}: name a smaller one, or a directory for it (--kv-store-dir)"
            )
        files = StoreFiles.create(num_blocks * geometry.block_bytes, directory=directory, shared=num_ranks > 1)
        return cls(files, geometry, num_blocks=num_blocks, num_ranks=num_ranks, rank=rank, create=True)

    @classmethod
    def join(cls, address: StoreAddress, geometry: StoreGeometry, *, rank: int) -> HostKVStore:
        """Enter, as `rank`, the store that another rank of this machine created.

        If an earlier process was this rank and has died, its references are dropped.

        Args:
            address: the creator's `address`. The creator must be alive.
            geometry: the same as the creator's.
            rank: this rank, 0 to `address.num_ranks` - 1.

        Raises:
            StoreFault: this rank's earlier process still runs, or the geometry differs.
            ConfigError: the store cannot be opened, or the native kernels are missing.
        """
        kv_store_kernels()
        try:
            files = StoreFiles.open(address.table_path, address.data_path, address.file_name)
        except OSError as error:
            raise ConfigError(
                f"rank {rank} cannot open the host KV store of its machine ({error}): all ranks of a machine have to "
                "run as the same user, and the rank that made the store has to be alive"
            ) from error
        return cls(files, geometry, num_blocks=address.num_blocks, num_ranks=address.num_ranks, rank=rank, create=False)

    def _enter(self) -> None:
        pid, start = self.handle.occupants()[self.rank]
        if pid and not is_running(pid, start):
            self.handle.reclaim(self.rank)
        self.handle.enter(os.getpid(), process_start(os.getpid()))

    @property
    def address(self) -> StoreAddress:
        """What other ranks pass to `join`. Raises StoreFault for a store of one rank in memory."""
        if self._files.data is None:
            raise StoreFault("a store of one rank in memory cannot be joined: create it for several ranks")
        return StoreAddress(
            table_path=path_for_others(self._files.table),
            data_path=path_for_others(self._files.data),
            file_name=self._files.name,
            num_blocks=self.num_blocks,
            num_ranks=self.num_ranks,
        )

    def prepare_store(self, num_blocks: int) -> torch.Tensor | None:
        """Take free blocks to copy pages to.

        The blocks are WRITING, with one reference, this rank's: no other rank can load or share them. The caller copies
        a page to each, waits for the tickets, and calls `complete_store`; or it calls `free`.

        Args:
            num_blocks: how many blocks to take.

        Returns:
            The blocks, int64 [num_blocks], or None when fewer are free; then none is taken.
        """
        with faults():
            blocks: torch.Tensor = self.handle.take(num_blocks)
        return blocks if len(blocks) == num_blocks else None

    def complete_store(self, blocks: Indices) -> None:
        """Mark blocks that this rank has written READY: they can be loaded from, and shared.

        The references stay this rank's. Data of a copy that failed is undefined: `free` such a block instead.

        Args:
            blocks: int64 [N], WRITING and held by this rank, with the tickets of all copies to them done.

        Raises:
            StoreFault: a block is not WRITING, not held by this rank, or a copy to it is under way.
        """
        with faults():
            self.handle.complete(as_indices(blocks))

    def claim(self, num_blocks: int) -> None:
        """Claim room on the disk for the first blocks, which are taken before all others. Raises OSError without room.

        Not needed for a store in memory, nor where room is claimed as blocks are written.
        """
        if self._files.data is not None:
            os.posix_fallocate(self._files.data, 0, num_blocks * self.geometry.block_bytes)

    def share(self, blocks: Indices) -> None:
        """Add one reference of this rank to each block, whichever rank wrote it.

        A rank that names its blocks to this one keeps its own references until this call has returned. Raises
        StoreFault if a block is not READY.
        """
        with faults():
            self.handle.share(as_indices(blocks))

    def free(self, blocks: Indices) -> None:
        """Drop one of this rank's references to each block. A block without references is FREE.

        Args:
            blocks: int64 [N], WRITING or READY, held by this rank. A block may be named as often as it is held.

        Raises:
            StoreFault: this rank holds no reference, or the reference is its last and a copy of the block is under way.
        """
        with faults():
            self.handle.free(as_indices(blocks))

    def reclaim(self, rank: int) -> int:
        """Drop all references of a rank whose process has died, and return how many blocks became FREE.

        Raises StoreFault if there is no such rank, or its process still runs.
        """
        with faults():
            if not 0 <= rank < self.num_ranks:
                raise StoreFault(f"rank {rank} of {self.num_ranks}")
            pid, start = self.handle.occupants()[rank]
            if pid and is_running(pid, start):
                raise StoreFault(
                    f"rank {rank} still runs as process {pid}: only a dead rank's blocks may be taken from it"
                )
            freed: int = self.handle.reclaim(rank)
        return freed

    def memory(self) -> torch.Tensor:
        """Return all bytes of a store in memory, uint8, without a copy. The memory lives as long as the tensor."""
        with faults():
            memory: torch.Tensor = self.handle.memory()
        return memory

    def counts(self) -> BlockCounts:
        """Return how many blocks are in each state now."""
        free, writing, ready, recoveries = self.handle.counts()
        return BlockCounts(free=free, writing=writing, ready=ready, recoveries=recoveries)

    def references(self, blocks: Indices) -> torch.Tensor:
        """Return how many references all ranks together hold to each block, int64 [N]."""
        with faults():
            references: torch.Tensor = self.handle.describe(as_indices(blocks))[1]
        return references

    def audit(self) -> None:
        """Check every block against the counts, in time linear in the blocks. Raises StoreFault if they differ."""
        with faults():
            self.handle.audit()

    def close(self) -> None:
        """Drop all references of this rank and leave the store. A second call does nothing.

        The caller has closed the copy engines before. The memory or the file is freed when no rank has it open. Raises
        StoreFault if a copy of one of its blocks is under way.
        """
        if self.handle is None:
            return
        with faults():
            self.handle.reclaim(self.rank)
        self.handle = None
        self._files.close()

    def __enter__(self) -> HostKVStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
