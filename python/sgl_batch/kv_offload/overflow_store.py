"""Owns where sequences wait that have outgrown the device: the exclusive host KV store, or, without a store, a file.

The file is made when the first sequence has to give way. Its room is claimed in chunks before it is used, so that a
full disk ends the growth and fails no copy. On a GPU memory takes its place, because a GPU copies only to pinned
memory; that has not run on one.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.config import MemoryConfig
from sgl_batch.errors import ConfigError
from sgl_batch.kv_offload.copy_engine import CopyEngine, CopyEngines
from sgl_batch.kv_offload.host_kv_store import HostKVStore
from sgl_batch.kv_offload.kv_tiers import KVTiers
from sgl_batch.kv_offload.leased_store import LeasedStore
from sgl_batch.kv_offload.store_geometry import PagedPool, StoreGeometry
from sgl_batch.kv_offload.stored_kv import StoredKV
from sgl_batch.metrics.counters import Counters

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 64 << 20
# Of what is free on the disk when the file is made, what stays free.
_LEFT_FREE = 0.1


def overflow_directory(memory: MemoryConfig) -> Path:
    """Return where files of sequences that have given way are made."""
    return Path(memory.kv_store_dir or tempfile.gettempdir())


class Overflow(Protocol):
    """Where whole sequences wait that have given way. One thread calls it.

    `leased`: what the rank has of a store that it shares with other ranks; None for a store of its own.
    """

    leased: LeasedStore | None

    @property
    def content(self) -> StoredKV:
        """The sequences that are there. Called while there is any, or after `has_room` was true."""

    def has_room(self, pages: int) -> bool:
        """Return whether this many pages more have room."""

    def put(self, names: list[str], pages: list[torch.Tensor], tokens: list[int]) -> None:
        """Copy all KV of these sequences, for which there is room; all is there when this returns.

        Args:
            names: the sequences.
            pages: the device pages of each, int64 [P], in its order.
            tokens: how many tokens of each have KV.

        Raises:
            CopyError: a copy failed.
        """

    def forget(self, name: str) -> None:
        """Free what a sequence has here, if anything."""

    def counts(self) -> dict[str, int]:
        """Return the store's figures for statistics; empty if they are not to be shown."""


class StoreOverflow:
    """An `Overflow` into the exclusive host KV store that was asked for."""

    def __init__(self, tiers: KVTiers) -> None:
        self._tiers, self.leased = tiers, tiers.leased(None)

    @property
    def content(self) -> StoredKV:
        return self._tiers.stored

    def has_room(self, pages: int) -> bool:
        return pages <= self._tiers.stored.free

    def put(self, names: list[str], pages: list[torch.Tensor], tokens: list[int]) -> None:
        self._tiers.stored.suspend(names, pages, tokens)

    def forget(self, name: str) -> None:
        self._tiers.stored.forget(name)

    def counts(self) -> dict[str, int]:
        return self._tiers.store_state()


class OverflowFile:
    """An `Overflow` into an exclusive store that is made on demand, in a file.

    `stored`: the sequences there; None before the first `has_room`.
    """

    leased: LeasedStore | None = None

    def __init__(
        self,
        pool: PagedPool,
        memory: MemoryConfig,
        counters: Counters,
        copy_engines: Callable[[HostKVStore], CopyEngines],
        *,
        page_size: int,
        device_pages: int,
        num_ranks: int = 1,
        in_memory: bool = False,
    ) -> None:
        """Take note of what a store will be made of.

        Args:
            pool: the device's pages.
            memory: where the file is to lie (`kv_store_dir`), and whether pages have checksums.
            counters: where copies are counted.
            copy_engines: makes the copy engines of a store.
            page_size: tokens of a page.
            device_pages: how many pages the device has: as many blocks has a store in memory.
            num_ranks: how many ranks may each have a file in that directory: they share what is free there.
            in_memory: whether to take memory instead of a file.
        """
        self._pool, self._memory, self._counters, self._copy_engines = pool, memory, counters, copy_engines
        self._page_size, self._device_pages, self._in_memory = page_size, device_pages, in_memory
        self._num_ranks, self._directory = num_ranks, overflow_directory(memory)
        self._store: HostKVStore | None = None
        self._engine: CopyEngine | None = None
        self._claimed = 0
        self._is_full = False
        self.stored: StoredKV | None = None

    def has_room(self, pages: int) -> bool:
        """See Overflow. The file is made or grown for these pages if need be."""
        if self.stored is None and not self._is_full:
            self._make()
        if self.stored is None:
            return False
        return self.stored.held + pages <= self._claimed or self._grow(self.stored.held + pages)

    def _make(self) -> None:
        if not hasattr(self._pool, "page_parts"):
            self._give_up("this model's pages have no form there")
            return
        try:
            geometry = StoreGeometry.of_pool(self._pool, checksums=self._memory.kv_store_checksums)
            num_bytes, directory = self._device_pages * geometry.block_bytes, None
            if not self._in_memory:
                directory = self._directory
                space = os.statvfs(directory)
                num_bytes = int((1 - _LEFT_FREE) * space.f_bavail * space.f_frsize / self._num_ranks)
            self._store = HostKVStore.create(geometry, num_bytes=num_bytes, directory=directory)
        except (ConfigError, OSError) as error:
            self._give_up(str(error))
            return
        self._claimed = self._store.num_blocks if self._in_memory else 0
        self._engine = self._copy_engines(self._store).engine_for(self._pool)
        self.stored = StoredKV(
            self._store,
            self._engine,
            page_size=self._page_size,
            layers=self._pool.layer_num,
            leased=self._store.num_blocks,
            counters=self._counters,
            exclusive=True,
        )

    def _grow(self, num_blocks: int) -> bool:
        """Claim room for so many blocks, and some more for those to come."""
        assert self._store is not None, "the store is made"
        if self._is_full:
            return False
        if num_blocks > self._store.num_blocks:
            self._give_up(f"it was made for at most {self._store.num_blocks} pages")
            return False
        block_bytes = self._store.geometry.block_bytes
        chunk = min(self._store.num_blocks, self._claimed + max(1, _CHUNK_BYTES // block_bytes))
        for wanted in sorted({max(chunk, num_blocks), num_blocks}, reverse=True):
            try:
                self._store.claim(wanted)
            except OSError as error:
                reason = str(error)
                continue
            if not self._claimed:
                logger.warning(
                    "sequences have outgrown the device's pages of KV: those that wait move to a file of %s in %s, "
                    "which grows as they need and goes with this process (--admission, --kv-store-dir)",
                    format_bytes(wanted * block_bytes),
                    self._directory,
                )
            self._counters.add("overflow_bytes", (wanted - self._claimed) * block_bytes)
            self._claimed = wanted
            return True
        self._give_up(reason)
        return False

    def _give_up(self, reason: str) -> None:
        """Sequences that lack pages wait on the device from now on: said once."""
        self._is_full = True
        logger.warning(
            "sequences that have outgrown the device's pages of KV do not move to %s from now on (%s): they wait with "
            "their pages, and go on one after the other",
            self._directory,
            reason,
        )

    @property
    def content(self) -> StoredKV:
        assert self.stored is not None, "a sequence has moved there"
        return self.stored

    def counts(self) -> dict[str, int]:
        return {}

    def forget(self, name: str) -> None:
        if self.stored is not None:
            self.stored.forget(name)

    def put(self, names: list[str], pages: list[torch.Tensor], tokens: list[int]) -> None:
        self.content.suspend(names, pages, tokens)

    def close(self) -> None:
        """Leave the store; its file goes with it."""
        if self._engine is not None:
            self._engine.close()
        if self._store is not None:
            self._store.close()
