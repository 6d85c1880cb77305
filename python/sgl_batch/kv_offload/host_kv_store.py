"""Owns the store tier: blocks of one page each, in memory or in a file, shared by the ranks of one machine.

What is stored, and when a block is let go, is decided elsewhere; data is moved by a copy engine. A block is FREE, then
WRITING (`prepare_store`: its rank may copy a page to it), then READY (`complete_store`: it may be restored and shared,
and while it has one reference its rank may copy to it again).
Every reference to a block belongs to a rank; the block is free when the last one is dropped.
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

if TYPE_CHECKING:
    from types import TracebackType

Indices = torch.Tensor | Sequence[int]
"""Blocks or device pages: int64 [N] on the CPU, or numbers."""


def as_indices(numbers: Indices) -> torch.Tensor:
    """Blocks or pages as the native library takes them: on the host, wherever they come from."""
    return torch.as_tensor(numbers, dtype=torch.int64).cpu().contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """What another rank of the machine needs to join a store; valid while the rank that gave it has the store open."""

    table_path: str
    data_path: str
    file_name: str
    num_blocks: int
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """How many blocks are in each state, all ranks together."""

    free: int
    writing: int
    ready: int
    recoveries: int
    """How often a rank died in the middle of a change, and the next one counted everything again."""

    @property
    def used(self) -> int:
        return self.writing + self.ready


class HostKVStore:
    """One rank's end of a store. Made by `create` on one rank and `join` on the others. Any thread may call it.

    A call with several blocks does all of it, or raises StoreFault and changes nothing. A rank that dies never blocks
    the others, also in the middle of a call; what it held stays taken until somebody calls `reclaim`.
    """

    def __init__(
        self, files: StoreFiles, geometry: StoreGeometry, *, num_blocks: int, num_ranks: int, rank: int, create: bool
    ) -> None:
        """For `create` and `join`. Takes over `files`."""
        self.geometry, self.num_blocks, self.num_ranks, self.rank = geometry, num_blocks, num_ranks, rank
        self._files = files
        try:
            with faults():
                # Of the native library's kv_store.Store, for the copy engine.
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
        """A new store of at most `num_bytes`, in a file in `directory`, or in memory. Nothing is claimed before use.

        Raises ConfigError where there is no room for it, or the native kernels are missing.
        """
        kv_store_kernels()
        num_blocks = num_bytes // geometry.block_bytes
        if num_blocks < 1:
            raise ConfigError(
                f"a host KV store of {num_bytes} bytes (--kv-store-bytes) holds no page: one takes "
                f"{geometry.block_bytes} bytes in all {geometry.num_layers} layers; name a larger store"
            )
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if directory is None and num_bytes > memory_bytes:
            raise ConfigError(
                f"a host KV store of {num_bytes} bytes (--kv-store-bytes) is larger than the machine's memory of "
                f"{memory_bytes}: name a smaller one, or a directory for it (--kv-store-dir)"
            )
        files = StoreFiles.create(num_blocks * geometry.block_bytes, directory=directory, shared=num_ranks > 1)
        return cls(files, geometry, num_blocks=num_blocks, num_ranks=num_ranks, rank=rank, create=True)

    @classmethod
    def join(cls, address: StoreAddress, geometry: StoreGeometry, *, rank: int) -> HostKVStore:
        """The store of another rank of this machine, as `rank`.

        Where an earlier process was this rank and has died, what it held is dropped. Raises StoreFault where it still
        runs, or where pages are of another geometry; ConfigError where the store cannot be opened.
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
        """For the other ranks' `join`."""
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
        """Blocks [num_blocks] to copy pages to, WRITING and held once by this rank; None when too few are free."""
        with faults():
            blocks: torch.Tensor = self.handle.take(num_blocks)
        return blocks if len(blocks) == num_blocks else None

    def complete_store(self, blocks: Indices) -> None:
        """Blocks that this rank has written become READY. Only after the tickets of all copies to them are done."""
        with faults():
            self.handle.complete(as_indices(blocks))

    def share(self, blocks: Indices) -> None:
        """One more reference for this rank to each of these READY blocks, whichever rank wrote them.

        Another rank's blocks must be held by it until this has returned: it has no other way to know them.
        """
        with faults():
            self.handle.share(as_indices(blocks))

    def free(self, blocks: Indices) -> None:
        """Drop one of this rank's references to each block; those that have none left are free."""
        with faults():
            self.handle.free(as_indices(blocks))

    def reclaim(self, rank: int) -> int:
        """Drop all that a rank held whose process has died; returns how many blocks became free by it."""
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
        """All bytes of a store in memory, uint8, without a copy; they stay as long as the tensor does."""
        with faults():
            memory: torch.Tensor = self.handle.memory()
        return memory

    def counts(self) -> BlockCounts:
        """How many blocks are in each state now."""
        free, writing, ready, recoveries = self.handle.counts()
        return BlockCounts(free=free, writing=writing, ready=ready, recoveries=recoveries)

    def references(self, blocks: Indices) -> torch.Tensor:
        """How many references all ranks together hold to each block."""
        with faults():
            references: torch.Tensor = self.handle.describe(as_indices(blocks))[1]
        return references

    def audit(self) -> None:
        """Count everything again: takes as long as the store is large. Raises StoreFault where something is lost."""
        with faults():
            self.handle.audit()

    def close(self) -> None:
        """Drop all that this rank holds and leave. Copy engines are closed before. A second time nothing happens.

        The memory, or the file, goes when no rank has it open any more.
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
