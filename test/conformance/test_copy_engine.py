"""Copies run in the background in a bounded queue, in order if they touch the same pages; every wait ends."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from store_cases import FORMS, Form, PlainPool, prepared, store_and_engine, stored

from sgl_batch.kv_offload.host_kv_store import HostKVStore
from sgl_batch.kv_offload.native_copy_engine import NativeCopyEngine, NativeTicket
from sgl_batch.kv_offload.store_errors import CopyCancelled, StoreFault

pytest.importorskip("sgl_batch_kernel.kv_store")
LARGE = 16 << 20  # bytes of a page that takes milliseconds to copy
BACKLOG = 500  # copies of such a page, one after the other: they take a second or more
ONE_LAYER = range(1)

Parts = tuple[HostKVStore, NativeCopyEngine, PlainPool]


@pytest.fixture(params=FORMS, ids=str)
def form(request: pytest.FixtureRequest) -> Form:
    assert isinstance(request.param, Form)
    return request.param


@pytest.fixture
def large(form: Form, tmp_path: Path) -> Iterator[Parts]:
    """A few pages of one layer, large enough to observe running copies; page i is filled with i."""
    pool = PlainPool([(torch.zeros(6, LARGE, dtype=torch.uint8),)])
    for page in range(6):
        pool.fill(page, page)
    with store_and_engine(form, pool, tmp_path, num_blocks=8, max_bytes=1 << 40) as (store, engine):
        yield store, engine, pool


@contextlib.contextmanager
def backlog(store: HostKVStore, engine: NativeCopyEngine) -> Iterator[list[NativeTicket]]:
    """Submit copies of all pages, which delay later copies in the block; at its end cancel those that still wait."""
    block = prepared(store, 1)
    # All use one block, so they run one after the other.
    tickets = [engine.store_pages(ONE_LAYER, [turn % 6], block) for turn in range(BACKLOG)]
    try:
        yield tickets
    finally:
        for ticket in tickets:
            ticket.cancel()
        for ticket in tickets:
            with contextlib.suppress(CopyCancelled):
                ticket.wait()
        store.free(block)


def test_copies_that_touch_the_same_device_page_run_in_the_order_of_submission(form: Form, tmp_path: Path) -> None:
    pool = PlainPool.random(layers=2, part_bytes=(30_000, 12_000), pages=8)
    pages, others, rounds = list(range(4)), list(range(4, 8)), range(24)
    with store_and_engine(form, pool, tmp_path, num_blocks=200) as (store, engine):
        sources = []
        for turn in rounds:
            for page in pages:
                pool.fill(page, 5 * turn + page)
            sources.append(stored(store, engine, pages))
        targets = [prepared(store, 4) for _ in rounds]
        tickets = []
        for source, target in zip(sources, targets, strict=True):
            tickets += [engine.load_pages(range(2), source, pages), engine.store_pages(range(2), pages, target)]
        for ticket in tickets:
            ticket.wait()
        store.complete_store(torch.cat(targets))
        for turn, target in zip(rounds, targets, strict=True):
            engine.load_pages(range(2), target, others).wait()
            assert [pool.value(page) for page in others] == [5 * turn + page for page in pages]


def test_copies_to_the_same_block_run_in_the_order_of_submission(large: Parts) -> None:
    store, engine, pool = large
    block = prepared(store, 1)
    tickets = [engine.store_pages(ONE_LAYER, [page], block) for page in (1, 2, 3, 4)]
    for ticket in tickets:
        ticket.wait()
    store.complete_store(block)
    engine.load_pages(ONE_LAYER, block, [0]).wait()
    assert pool.value(0) == 4


def test_copies_behind_a_cancelled_one_keep_their_order(large: Parts) -> None:
    store, engine, pool = large
    blocks = stored(store, engine, [1, 2, 3]).tolist()
    with backlog(store, engine):
        first, second, third = (engine.load_pages(ONE_LAYER, [block], [0]) for block in blocks)
        assert second.cancel()
    third.wait()
    assert first.done
    assert pool.value(0) == 3
    with pytest.raises(CopyCancelled):
        second.wait()


def test_a_cancelled_copy_writes_nothing_and_its_blocks_can_be_freed(large: Parts) -> None:
    store, engine, pool = large
    block = stored(store, engine, [1])
    with backlog(store, engine):
        load = engine.load_pages(ONE_LAYER, torch.cat((block, block)), [0, 5])
        assert load.cancel()
        assert not load.cancel(), "a cancelled copy cannot be cancelled again"
    for _ in range(2):
        with pytest.raises(CopyCancelled):
            load.wait()
    assert (pool.value(0), pool.value(5)) == (0, 5)
    store.free(block)
    done = engine.load_pages(ONE_LAYER, stored(store, engine, [2]), [0])
    done.wait()
    assert not done.cancel(), "an ended copy cannot be cancelled"
    done.wait()


def test_a_block_of_a_running_copy_can_be_neither_freed_nor_completed(large: Parts) -> None:
    store, engine, _ = large
    block = prepared(store, 1)
    with backlog(store, engine):
        ticket = engine.store_pages(ONE_LAYER, [0], block)
        for call in (store.free, store.complete_store):
            with pytest.raises(StoreFault, match=r"while a copy .* is under way"):
                call(block)
        with pytest.raises(StoreFault, match="close the copy engine first"):
            store.close()
    ticket.wait()
    store.complete_store(block)
    store.free(block)


def test_wait_times_out_and_the_copy_goes_on(large: Parts) -> None:
    store, engine, pool = large
    block = stored(store, engine, [4])
    with backlog(store, engine):
        load = engine.load_pages(ONE_LAYER, block, [0])
        with pytest.raises(TimeoutError, match=r"0\.001 s"):
            load.wait(0.001)
        assert not load.done
    load.wait(60.0)
    assert load.done
    assert pool.value(0) == 4
    assert engine.counters().ticket_wait_s >= 0.001


def test_submission_waits_while_the_queue_is_full(form: Form, tmp_path: Path) -> None:
    pool = PlainPool.random(layers=1, part_bytes=(1 << 20,), pages=20)
    with store_and_engine(form, pool, tmp_path, max_tickets=2) as (store, engine):
        blocks, tickets = prepared(store, 20), []
        for turn in range(200):
            tickets.append(engine.store_pages(ONE_LAYER, [turn % 20], blocks[turn % 20 : turn % 20 + 1]))
            assert sum(not ticket.done for ticket in tickets) <= 2
        for ticket in tickets:
            ticket.wait()
        counters = engine.counters()
        assert counters.submit_wait_s > 0
        assert (counters.tickets, counters.stored_pages, counters.stored_bytes) == (200, 200, 200 << 20)


def test_a_copy_larger_than_the_queue_runs_alone(form: Form, tmp_path: Path) -> None:
    pool = PlainPool.random(layers=2, part_bytes=(1 << 16,), pages=20)
    with store_and_engine(form, pool, tmp_path, max_bytes=1 << 17) as (store, engine):
        blocks = prepared(store, 20)
        tickets = [engine.store_pages(range(2), range(20), blocks) for _ in range(5)]
        assert sum(not ticket.done for ticket in tickets) <= 1
        for ticket in tickets:
            ticket.wait()


def test_several_threads_submit_to_a_full_queue_without_deadlock(form: Form, tmp_path: Path) -> None:
    # All threads submit at once, and copies take long enough that the others find the queue full.
    pool = PlainPool.random(layers=2, part_bytes=(500_000,), pages=40)
    before = [part.clone() for parts in pool.parts for part in parts]
    with store_and_engine(form, pool, tmp_path, max_tickets=1) as (store, engine):
        faults: list[BaseException] = []
        together = threading.Barrier(4)

        def work(first: int) -> None:
            pages = list(range(first, first + 10))
            try:
                for _ in range(10):
                    together.wait()
                    blocks = stored(store, engine, pages)
                    engine.load_pages(range(2), blocks, pages[::-1]).wait()
                    engine.load_pages(range(2), blocks, pages).wait()
                    store.free(blocks)
            except BaseException as fault:  # noqa: BLE001 (handed to the main thread)
                together.abort()
                faults.append(fault)

        threads = [threading.Thread(target=work, args=(first,)) for first in range(0, 40, 10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert faults == []
        assert store.counts().used == 0
        assert engine.counters().submit_wait_s > 0
    after = [part for parts in pool.parts for part in parts]
    assert all(torch.equal(new, old) for new, old in zip(after, before, strict=True))


def test_waits_and_copies_release_the_gil(large: Parts) -> None:
    store, engine, _ = large
    begun = threading.Event()
    with backlog(store, engine) as tickets:

        def wait() -> None:
            begun.set()
            with contextlib.suppress(CopyCancelled):
                tickets[-1].wait()

        waiter = threading.Thread(target=wait)
        waiter.start()
        begun.wait()
        turns = 0
        while not tickets[-1].done and turns < 50:
            turns += 1
    waiter.join()
    assert turns == 50, "the GIL was held until the copy had ended"


def test_close_cancels_waiting_copies_and_waits_for_running_ones(large: Parts) -> None:
    store, engine, _ = large
    with backlog(store, engine) as tickets:
        engine.close()
        assert all(ticket.done for ticket in tickets)
        with pytest.raises(CopyCancelled):
            tickets[-1].wait()
    block = prepared(store, 1)
    with pytest.raises(StoreFault, match="the copy engine is closed"):
        engine.store_pages(ONE_LAYER, [0], block)
    engine.close()
    assert engine.counters().tickets == len(tickets)


def test_close_wakes_a_submission_that_waits_for_room(form: Form, tmp_path: Path) -> None:
    pool = PlainPool([(torch.zeros(6, LARGE, dtype=torch.uint8),)])
    with store_and_engine(form, pool, tmp_path, num_blocks=8, max_tickets=1) as (store, engine):
        block = prepared(store, 1)
        ended: list[str] = []

        def submit() -> None:
            try:
                while True:
                    engine.store_pages(ONE_LAYER, [1], block)
                    begun.set()
            except StoreFault as fault:
                ended.append(str(fault))

        begun = threading.Event()
        thread = threading.Thread(target=submit)
        thread.start()
        begun.wait()
        engine.close()
        thread.join()
        assert ended == ["the copy engine is closed"]
        store.free(block)


def test_a_garbage_collected_engine_ends_its_threads_and_copies(form: Form, tmp_path: Path) -> None:
    pool = PlainPool([(torch.zeros(6, LARGE, dtype=torch.uint8),)])
    with store_and_engine(form, pool, tmp_path, num_blocks=8) as (store, kept):
        kept.close()
        dropped = NativeCopyEngine(store, pool, num_workers=form.num_workers, max_bytes=1 << 40)
        block = prepared(store, 1)
        ticket = [dropped.store_pages(ONE_LAYER, [1], block) for _ in range(BACKLOG)][-1]
        assert "sgl-copy-0" in _thread_names()
        del dropped
        gc.collect()
        assert ticket.done
        assert "sgl-copy-0" not in _thread_names()
        store.free(block)


def _thread_names() -> set[str]:
    return {path.read_text(encoding="utf-8").strip() for path in Path("/proc/self/task").glob("*/comm")}


def test_a_copy_of_no_pages_is_done_at_once(form: Form, tmp_path: Path) -> None:
    with store_and_engine(form, PlainPool.random(), tmp_path) as (_, engine):
        engine.store_pages(range(3), [], []).wait(10.0)
        engine.load_pages(range(0), torch.empty(0), torch.empty(0)).wait(10.0)


@pytest.mark.parametrize(
    ("layers", "pages", "message"),
    [
        (range(0, 4), [1, 2], "layers 0 to 4 of 3"),
        (range(-1, 2), [1, 2], "layers -1 to 2 of 3"),
        (range(0, 3, 2), [1, 2], "is no span of layers"),
        (range(3), [1], "1 device pages and 2 slots"),
        (range(3), [1, 40], "device page 40 of 40"),
        (range(3), [-1, 0], "device page -1 of 40"),
    ],
)
def test_copies_outside_the_layers_pages_or_blocks_are_refused(
    layers: range, pages: list[int], message: str, tmp_path: Path
) -> None:
    with store_and_engine(FORMS[0], PlainPool.random(), tmp_path) as (store, engine):
        blocks = prepared(store, 2)
        with pytest.raises(StoreFault, match=message):
            engine.store_pages(layers, pages, blocks)
        store.free(blocks)


def test_two_blocks_cannot_be_loaded_to_one_page(tmp_path: Path) -> None:
    with store_and_engine(FORMS[0], PlainPool.random(), tmp_path) as (store, engine):
        blocks = stored(store, engine, [1, 2])
        with pytest.raises(StoreFault, match="device page 7 stands twice among the targets"):
            engine.load_pages(range(3), blocks, [7, 7])
        store.free(blocks)


def test_a_ready_block_with_one_reference_can_be_written_again(tmp_path: Path) -> None:
    pool = PlainPool.random()
    with store_and_engine(FORMS[0], pool, tmp_path) as (store, engine):
        block = stored(store, engine, [1])
        engine.store_pages(range(3), [2], block).wait()
        store.share(block)
        with pytest.raises(StoreFault, match="has to be WRITING, or READY with one reference"):
            engine.store_pages(range(3), [3], block)
        engine.load_pages(range(3), block, [5]).wait()
        assert all(torch.equal(part[5], part[2]) for layer in range(3) for part in pool.page_parts(layer))
        store.free(block)
        store.free(block)
