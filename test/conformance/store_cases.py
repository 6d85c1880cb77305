"""Owns the pools, stores and copy engines that the tests of the host KV store use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from sgl_batch.kv_offload.host_kv_store import HostKVStore
from sgl_batch.kv_offload.native_copy_engine import NativeCopyEngine
from sgl_batch.kv_offload.store_geometry import StoreGeometry

NUM_PAGES = 40


@dataclass(frozen=True, slots=True)
class PlainPool:
    """Pages of any size: `parts[layer][part]`, uint8 [num_pages, bytes]."""

    parts: list[tuple[torch.Tensor, ...]]

    @classmethod
    def random(
        cls, *, layers: int = 3, part_bytes: tuple[int, ...] = (4096, 4096), pages: int = NUM_PAGES
    ) -> PlainPool:
        generator = torch.Generator().manual_seed(pages)

        def part(num_bytes: int) -> torch.Tensor:
            return torch.randint(0, 256, (pages, num_bytes), dtype=torch.uint8, generator=generator)

        return cls([tuple(part(num_bytes) for num_bytes in part_bytes) for _ in range(layers)])

    @property
    def layer_num(self) -> int:
        return len(self.parts)

    def page_parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.parts[layer]

    def page(self, number: int) -> list[torch.Tensor]:
        """Return all parts of a page, as views."""
        return [part[number] for parts in self.parts for part in parts]

    def fill(self, page: int, value: int) -> None:
        for part in self.page(page):
            part.fill_(value)

    def value(self, page: int) -> int | None:
        """Return the value with which `fill` filled the page; None if its bytes differ."""
        values = {int(value) for part in self.page(page) for value in (part.min(), part.max())}
        return values.pop() if len(values) == 1 else None


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of store, and the number of workers of its copy engine."""

    kind: str
    num_workers: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.num_workers}"

    @contextmanager
    def store(
        self, geometry: StoreGeometry, tmp_path: Path, *, num_blocks: int = NUM_PAGES, num_ranks: int = 1
    ) -> Iterator[HostKVStore]:
        directory = tmp_path if self.kind == "file" else None
        num_bytes = num_blocks * geometry.block_bytes
        with HostKVStore.create(geometry, num_bytes=num_bytes, num_ranks=num_ranks, directory=directory) as store:
            yield store
            store.audit()

    @contextmanager
    def engine(self, store: HostKVStore, pool: PlainPool, **limits: int) -> Iterator[NativeCopyEngine]:
        engine = NativeCopyEngine(store, pool, num_workers=self.num_workers, **limits)
        try:
            yield engine
        finally:
            engine.close()


# "memory": memory of one rank; "shared": memory that several ranks of a machine share; "file": a file.
KINDS = ("memory", "shared", "file")
FORMS = [Form(kind, workers) for kind in KINDS for workers in (1, 2)]


@contextmanager
def store_and_engine(
    form: Form,
    pool: PlainPool,
    tmp_path: Path,
    *,
    checksums: bool = False,
    num_blocks: int = NUM_PAGES,
    **limits: int,
) -> Iterator[tuple[HostKVStore, NativeCopyEngine]]:
    """Yield a store for the pool's pages and a copy engine between both."""
    geometry = StoreGeometry.of_pool(pool, checksums=checksums)
    num_ranks = 2 if form.kind == "shared" else 1
    with (
        form.store(geometry, tmp_path, num_blocks=num_blocks, num_ranks=num_ranks) as store,
        form.engine(store, pool, **limits) as engine,
    ):
        yield store, engine


def prepared(store: HostKVStore, count: int) -> torch.Tensor:
    """Return `count` blocks in state WRITING; the store must have them free."""
    blocks = store.prepare_store(count)
    assert blocks is not None
    return blocks


def stored(store: HostKVStore, engine: NativeCopyEngine, pages: list[int]) -> torch.Tensor:
    """Store these pages and return their READY blocks."""
    blocks = prepared(store, len(pages))
    engine.store_pages(range(store.geometry.num_layers), pages, blocks).wait()
    store.complete_store(blocks)
    return blocks
