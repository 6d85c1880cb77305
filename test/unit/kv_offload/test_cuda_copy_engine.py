"""The copy engine of GPUs, over streams that the test advances: its waits, the blocks it holds, its errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_batch.errors import ConfigError
from sgl_batch.kv_offload.cuda_copy_engine import CudaCopyEngine, CudaCopyEngines, CudaStreams
from sgl_batch.kv_offload.host_kv_store import HostKVStore
from sgl_batch.kv_offload.store_errors import CopyError, StoreFault
from sgl_batch.kv_offload.store_geometry import StoreGeometry

pytest.importorskip("sgl_batch_kernel.kv_store")
LAYERS = range(3)


@dataclass
class Event:
    """An event that happens when the test says so, or when it is waited for."""

    ended: bool = False
    fault: str | None = None

    def query(self) -> bool:
        if self.fault is not None:
            raise RuntimeError(self.fault)
        return self.ended

    def synchronize(self) -> None:
        self.ended = True
        self.query()


@dataclass
class Streams:
    """Makes copies at once, and keeps the events for which they would have waited."""

    pinned: list[torch.Tensor] = field(default_factory=list)
    waited_for: list[list[Event]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    held: list[Event] = field(default_factory=list)
    fault: str | None = None

    def pin(self, memory: torch.Tensor, block_bytes: int) -> None:
        self.pinned.append(memory)

    def unpin(self, memory: torch.Tensor, block_bytes: int) -> None:
        assert self.pinned.pop() is memory

    def follow(self, to_store: bool, others: Iterable[Any]) -> AbstractContextManager[Any]:
        if self.fault is not None:
            raise RuntimeError(self.fault)
        self.waited_for.append(list(others))
        return nullcontext()

    def mark(self, to_store: bool) -> Event:
        self.events.append(Event())
        return self.events[-1]

    def compute_waits(self, event: Any) -> None:
        self.held.append(event)


Parts = tuple[HostKVStore, CudaCopyEngine, Streams, list[tuple[torch.Tensor, ...]]]


@pytest.fixture
def parts() -> Iterator[Parts]:
    """A store of 12 blocks, an engine of at most 3 tickets, its streams, and 12 pages of bfloat16 in two parts."""
    layers = [(torch.randn(12, 2, 8).bfloat16(), torch.randn(12, 4, 8).bfloat16()) for _ in LAYERS]
    pool = SimpleNamespace(layer_num=3, page_parts=layers.__getitem__)
    geometry, streams = StoreGeometry.of_pool(pool), Streams()
    with HostKVStore.create(geometry, num_bytes=12 * geometry.block_bytes) as store:
        engines = CudaCopyEngines(store, streams)
        engine = engines.engine_for(pool, max_tickets=3)
        yield store, engine, streams, layers
        engine.close()
        engines.close()
        assert streams.pinned == []


def stored(store: HostKVStore, engine: CudaCopyEngine, pages: list[int]) -> torch.Tensor:
    blocks = store.prepare_store(len(pages))
    assert blocks is not None
    engine.store_pages(LAYERS, pages, blocks).wait()
    store.complete_store(blocks)
    return blocks


def test_pages_are_restored_bit_for_bit_and_others_stay(parts: Parts) -> None:
    store, engine, _, layers = parts
    before = [part.clone() for layer in layers for part in layer]
    blocks = stored(store, engine, [3, 1, 4])
    engine.load_pages(range(1, 3), blocks, [9, 8, 7]).wait()
    for index, part in enumerate(part for layer in layers for part in layer):
        assert torch.equal(part[[9, 8, 7]], before[index][[3, 1, 4] if index >= 2 else [9, 8, 7]])
        assert torch.equal(part[:7], before[index][:7])
    counters = engine.counters()
    assert (counters.stored_pages, counters.loaded_pages, counters.tickets) == (3, 3, 2)
    assert counters.stored_bytes == 3 * counters.loaded_bytes // 2 == 3 * 3 * (2 + 4) * 8 * 2


def test_a_copy_waits_for_the_other_direction_only_if_both_touch_a_page_or_block(
    parts: Parts,
) -> None:
    store, engine, streams, _ = parts
    ready, writing = stored(store, engine, [0, 1, 2]), store.prepare_store(3)
    streams.waited_for.clear()
    engine.load_pages(LAYERS, ready[:1], [5])
    engine.load_pages(LAYERS, ready[1:2], [6])
    first, second = streams.events[-2:]
    engine.store_pages(LAYERS, [6, 7], writing[:2])
    assert streams.waited_for == [[], [], [second]]
    first.ended = second.ended = True


def test_a_copy_does_not_wait_for_an_ended_ticket(parts: Parts) -> None:
    store, engine, streams, _ = parts
    ready, writing = stored(store, engine, [0]), store.prepare_store(1)
    engine.load_pages(LAYERS, ready, [5]).wait()
    engine.store_pages(LAYERS, [5], writing)
    assert streams.waited_for[-1] == []


def test_blocks_are_held_until_their_copy_has_ended(parts: Parts) -> None:
    store, engine, streams, _ = parts
    blocks = store.prepare_store(2)
    ticket = engine.store_pages(LAYERS, [0, 1], blocks)
    assert not ticket.done
    for call in (store.free, store.complete_store):
        with pytest.raises(StoreFault, match="under way"):
            call(blocks)
    assert not ticket.cancel()
    with pytest.raises(TimeoutError):
        ticket.wait(0.001)
    streams.events[-1].ended = True
    assert ticket.done
    store.complete_store(blocks)


def test_device_waits_blocks_the_device_and_not_the_host(parts: Parts) -> None:
    store, engine, streams, _ = parts
    ticket = engine.store_pages(LAYERS, [0, 1], store.prepare_store(2))
    ticket.device_waits()
    assert streams.held == [streams.events[-1]]
    assert not ticket.done
    ticket.wait()
    ticket.device_waits()
    assert len(streams.held) == 1


def test_engines_of_one_store_share_its_pinned_memory(parts: Parts) -> None:
    store, engine, streams, layers = parts
    blocks = stored(store, engine, [2, 5])
    with HostKVStore.create(store.geometry, num_bytes=2 * store.geometry.block_bytes) as other:
        pool = SimpleNamespace(
            layer_num=3, page_parts=[tuple(part[:4].clone() for part in of) for of in layers].__getitem__
        )
        both = CudaCopyEngines(other, Streams())
        first, second = both.engine_for(pool), both.engine_for(pool)
        held = stored(other, first, [1])
        second.load_pages(LAYERS, held, [3]).wait()
        assert all(torch.equal(part[1], part[3]) for layer in LAYERS for part in pool.page_parts(layer))
        first.close()
        second.load_pages(LAYERS, held, [0]).wait()
        second.close()
        both.close()
    assert len(streams.pinned) == 1
    store.free(blocks)


def test_submission_waits_for_the_oldest_ticket_while_the_queue_is_full(parts: Parts) -> None:
    store, engine, streams, _ = parts
    blocks = store.prepare_store(4)
    for index in range(4):
        engine.store_pages(LAYERS, [index], blocks[index : index + 1])
    assert [event.ended for event in streams.events] == [True, False, False, False]
    assert engine.counters().submit_wait_s > 0


def test_a_gpu_error_is_raised_by_wait_and_releases_the_blocks(parts: Parts) -> None:
    store, engine, streams, _ = parts
    blocks = store.prepare_store(1)
    ticket = engine.store_pages(LAYERS, [0], blocks)
    streams.events[-1].fault = "illegal memory access"
    for _ in range(2):
        with pytest.raises(CopyError, match="after a copy of 1 pages: illegal memory access"):
            ticket.wait()
    streams.fault = "out of memory"
    with pytest.raises(CopyError, match=r"refuses a copy of 1 pages, layers range\(0, 3\): out of memory"):
        engine.store_pages(LAYERS, [0], blocks)
    streams.fault = None
    assert engine.counters().errors == 2
    engine.store_pages(LAYERS, [0], blocks).wait()
    store.free(blocks)


def test_a_forbidden_copy_is_refused_and_holds_no_block(parts: Parts) -> None:
    store, engine, _, _ = parts
    blocks = store.prepare_store(2)
    ready = stored(store, engine, [0, 1])
    store.share(ready)
    for call, message in (
        (lambda: engine.load_pages(LAYERS, blocks, [1, 2]), "has to be READY"),
        (lambda: engine.store_pages(LAYERS, [1, 2], ready), "has to be WRITING"),
        (lambda: engine.store_pages(LAYERS, [1, 12], blocks), "device pages 1 to 12 of 12"),
        (lambda: engine.store_pages(LAYERS, [1], blocks), "1 device pages and 2 blocks"),
        (lambda: engine.store_pages(range(4), [1, 2], blocks), "no span of the 3 layers"),
        (lambda: engine.load_pages(LAYERS, ready, [5, 5]), "a target stands twice"),
    ):
        with pytest.raises(StoreFault, match=message):
            call()
    store.free(torch.cat((blocks, ready, ready)))


def test_close_waits_for_all_copies_and_refuses_new_ones(parts: Parts) -> None:
    store, engine, _, _ = parts
    blocks = store.prepare_store(2)
    ticket = engine.store_pages(LAYERS, [0, 1], blocks)
    engine.close()
    assert ticket.done
    with pytest.raises(StoreFault, match="closed"):
        engine.store_pages(LAYERS, [0, 1], blocks)


def test_checksums_are_refused_on_a_gpu() -> None:
    pool = SimpleNamespace(layer_num=1, page_parts=lambda layer: (torch.zeros(4, 64),))
    geometry = StoreGeometry.of_pool(pool, checksums=True)
    with (
        HostKVStore.create(geometry, num_bytes=1 << 20) as store,
        pytest.raises(ConfigError, match="--kv-store-checksums works with pages in RAM only"),
    ):
        CudaCopyEngines(store, Streams())


def test_copy_streams_have_priority_over_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    priorities: list[int] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority=0: priorities.append(priority))
    CudaStreams()
    assert priorities == [-1, -1], "one stream for each direction"
