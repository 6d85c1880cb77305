"""Measures KV copies between the device's pages and the host KV store: write-through, suspend, restore.

On a GPU copies go between its memory and the pinned store; that has not run yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from primitive_costs.timing import Cost, sample
from sgl_batch.kv_offload.copy_engine import CopyEngine
from sgl_batch.kv_offload.cuda_copy_engine import CudaCopyEngine
from sgl_batch.kv_offload.host_kv_store import HostKVStore
from sgl_batch.kv_offload.native_copy_engine import NativeCopyEngine
from sgl_batch.kv_offload.store_geometry import StoreGeometry
from sgl_batch.kv_offload.stored_kv import StoredKV
from sgl_batch.metrics.counters import Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSizes:
    """Pages of `page_size` tokens, whose keys and values take `part_bytes` each in every layer."""

    layers: int
    part_bytes: int
    page_size: int
    copy_threads: int


def measure(sizes: KVSizes, *, batch: int, contexts: list[int], device: str, rounds: int) -> list[Cost]:
    """Measure write-through of a page by each sequence, and suspending and restoring one sequence by context."""
    costs = [_write_through(sizes, batch, device, rounds)]
    for context in contexts:
        costs += _one_sequence(sizes, context, device, rounds)
    return costs


@dataclass(slots=True, kw_only=True)
class _Pages:
    """Make the device's pages: keys and values of each layer, uint8 [num_pages, bytes]."""

    layer_num: int
    parts: list[tuple[torch.Tensor, ...]]

    def page_parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.parts[layer]


@contextmanager
def _tiers(sizes: KVSizes, num_pages: int, device: str, *, exclusive: bool = False) -> Iterator[StoredKV]:
    """Yield the StoredKV of a store for twice as many pages as the device's; the device's pages are ones."""
    parts = [
        tuple(torch.ones(num_pages, sizes.part_bytes, dtype=torch.uint8, device=device) for _ in range(2))
        for _ in range(sizes.layers)
    ]
    pool = _Pages(layer_num=sizes.layers, parts=parts)
    geometry = StoreGeometry.of_pool(pool)
    with HostKVStore.create(geometry, num_bytes=2 * num_pages * geometry.block_bytes) as store:
        engine: CopyEngine
        if device == "cpu":
            engine = NativeCopyEngine(store, pool, num_workers=sizes.copy_threads)
        else:
            engine = CudaCopyEngine(store, pool)
        yield StoredKV(
            store,
            engine,
            page_size=sizes.page_size,
            layers=sizes.layers,
            leased=store.num_blocks,
            counters=Counters(),
            exclusive=exclusive,
        )
        engine.close()


def _write_through(sizes: KVSizes, batch: int, device: str, rounds: int) -> Cost:
    """Measure the step's waiting; the copies run during the next steps. A page fills once in its tokens."""
    names = [f"s{number}" for number in range(batch)]
    with _tiers(sizes, batch, device) as stored:
        pages = torch.arange(batch)

        def begin() -> None:
            for name in names:
                stored.forget(name)
                stored.adopt(name, torch.empty(0, dtype=torch.int64), 0)
            stored.sync(wait=True)

        samples = sample(lambda: stored.write_through(names, pages), rounds=rounds, device="cpu", prepare=begin)
        stored.sync(wait=True)
    return Cost(
        category="yield, between passes",
        operation=f"hand over a full page of {sizes.page_size} tokens of each, copied in the background",
        unit=f"{batch} sequences",
        samples_s=samples,
        per_step=1 / sizes.page_size,
    )


class _OneSequence:
    """A sequence whose last page is not full, on the device or in the store."""

    def __init__(self, stored: StoredKV, sizes: KVSizes, context: int) -> None:
        num_pages = -(-context // sizes.page_size)
        self._stored, self._pages = stored, torch.arange(num_pages)
        self._tokens = num_pages * sizes.page_size - 1
        self._waits = False
        self.suspend()

    def suspend(self) -> None:
        self._stored.suspend(["s"], [self._pages], [self._tokens])
        self._waits = True

    def restore(self) -> None:
        self._stored.restore("s", self._pages).wait()
        self._stored.restored("s")
        self._waits = False

    def run(self) -> None:
        """Bring it to the device."""
        if self._waits:
            self.restore()

    def wait(self) -> None:
        """Bring it to the store."""
        if not self._waits:
            self.suspend()


def _one_sequence(sizes: KVSizes, context: int, device: str, rounds: int) -> list[Cost]:
    costs = []
    for store, what in (("inclusive", "the last page leaves, the others have"), ("exclusive", "all pages leave")):
        with _tiers(sizes, -(-context // sizes.page_size), device, exclusive=store == "exclusive") as stored:
            sequence = _OneSequence(stored, sizes, context)
            suspended = sample(sequence.suspend, rounds=rounds, device=device, prepare=sequence.run)
            costs.append(
                Cost(
                    category="suspend",
                    operation=f"{store} store: {what}",
                    unit="a sequence",
                    samples_s=suspended,
                    context=context,
                )
            )
            restored = sample(sequence.restore, rounds=rounds, device=device, prepare=sequence.wait)
    return [
        *costs,
        Cost(
            category="combine, with KV",
            operation="all pages come back from the store",
            unit="a sequence",
            samples_s=restored,
            context=context,
        ),
        Cost(
            category="combine, with KV",
            operation="all pages come back from the store",
            unit="a sequence, a layer",
            samples_s=tuple(seconds / sizes.layers for seconds in restored),
            context=context,
        ),
    ]
