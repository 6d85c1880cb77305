"""The blocks of sequences in the store: pages are stored as they fill, and no block is lost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from host_syncs import HostSyncs
from sgl_batch.kv_offload import stored_kv
from sgl_batch.kv_offload.host_kv_store import HostKVStore
from sgl_batch.kv_offload.kv_tiers import KVTiers
from sgl_batch.kv_offload.native_copy_engine import NativeCopyEngine
from sgl_batch.kv_offload.store_geometry import StoreGeometry
from sgl_batch.kv_offload.stored_kv import StoredKV
from sgl_batch.metrics.counters import Counters

PAGE, LAYERS = 4, 3


@pytest.fixture
def pool():
    parts = [(torch.arange(40.0 * PAGE).view(40, PAGE) + 1000 * layer,) for layer in range(LAYERS)]
    return SimpleNamespace(layer_num=LAYERS, page_parts=lambda layer: parts[layer])


@pytest.fixture
def counters():
    return Counters()


@pytest.fixture
def store(pool):
    with HostKVStore.create(StoreGeometry.of_pool(pool, checksums=True), num_bytes=12 * 4096) as made:
        yield made


@pytest.fixture
def stored(store, pool, counters):
    engine = NativeCopyEngine(store, pool)
    yield StoredKV(store, engine, page_size=PAGE, layers=LAYERS, leased=store.num_blocks, counters=counters)
    engine.close()


def prompt(stored: StoredKV, store: HostKVStore, name: str, tokens: int) -> None:
    """Store a sequence's prompt. The content of its pages does not matter here."""
    blocks = stored.take(-(-tokens // PAGE))
    stored._engine.store_pages(range(LAYERS), range(len(blocks)), blocks).wait()
    store.complete_store(blocks)
    stored.adopt(name, blocks, tokens)


def test_a_restored_sequence_has_its_kv_unchanged(stored, store, pool, counters):
    stored.adopt("a", torch.empty(0, dtype=torch.int64), 0)
    stored.write_through(["a"], torch.tensor([7]))
    stored.write_through(["a"], torch.tensor([3]))
    stored.suspend(["a"], [torch.tensor([7, 3, 9])], [9])
    before = [pool.page_parts(layer)[0][[7, 3, 9]].clone() for layer in range(LAYERS)]
    stored.restore("a", torch.tensor([20, 21, 22])).wait()
    assert all(torch.equal(pool.page_parts(layer)[0][20:23], before[layer]) for layer in range(LAYERS))
    stored.restored("a")
    assert store.counts().used == 2, "the open page's block is freed, and the full page gets another"
    assert counters.counts["pages_copied_to_suspend"] == 1
    assert counters.counts["pages_written_through"] == 2


def test_suspending_a_sequence_whose_last_page_is_full_copies_nothing(stored, counters):
    stored.adopt("a", torch.empty(0, dtype=torch.int64), 0)
    stored.write_through(["a"], torch.tensor([7]))
    stored.suspend(["a"], [torch.tensor([7])], [4])
    assert counters.counts["pages_copied_to_suspend"] == 0


def test_a_restored_sequence_frees_the_block_of_its_open_page(stored, store):
    prompt(stored, store, "a", 6)
    assert store.counts().used == 2
    stored.restore("a", torch.tensor([5, 6])).wait()
    stored.restored("a")
    assert store.counts().used == 1


def test_blocks_of_an_ended_sequence_are_freed_after_their_copies(stored, store):
    stored.adopt("a", torch.empty(0, dtype=torch.int64), 0)
    stored.write_through(["a"], torch.tensor([7]))
    stored.forget("a")
    stored.sync(wait=True)
    assert store.counts().free == store.num_blocks
    stored.forget("a")
    store.audit()


class LateDownload:
    """A download of page numbers that ends when the test says so, or when it is waited for."""

    come = False

    def __init__(self, pages: torch.Tensor) -> None:
        self._pages = pages

    @property
    def done(self) -> bool:
        return self.come

    def wait(self) -> torch.Tensor:
        return self._pages


@pytest.mark.parametrize("how", ["comes", "is waited for", "ends before"])
def test_a_written_through_page_is_copied_once_its_number_is_on_the_host(how, stored, store, pool, monkeypatch):
    monkeypatch.setattr(stored_kv, "Download", LateDownload)
    monkeypatch.setattr(LateDownload, "come", False)
    stored.adopt("a", torch.empty(0, dtype=torch.int64), 0)
    stored.write_through(["a"], torch.tensor([7]))
    stored.sync(wait=False)
    assert stored._engine.counters().tickets == 0, "the host has not waited"
    assert store.counts().writing == 1
    if how == "ends before":
        stored.forget("a")
        assert store.counts().writing == 1, "a copy to it may begin"
        stored.sync(wait=True)
        assert store.counts().free == store.num_blocks
        return
    if how == "comes":
        monkeypatch.setattr(LateDownload, "come", True)
        stored.send_known()
        assert stored._engine.counters().tickets == 1
    stored.suspend(["a"], [torch.tensor([7])], [4])
    before = [pool.page_parts(layer)[0][7].clone() for layer in range(LAYERS)]
    stored.restore("a", torch.tensor([20])).wait()
    assert all(torch.equal(pool.page_parts(layer)[0][20], before[layer]) for layer in range(LAYERS))


def test_write_through_never_blocks_the_host(stored, store, monkeypatch):
    syncs, prepare = HostSyncs(), store.prepare_store

    def prepared(count):
        blocks = prepare(count)
        syncs.mark(blocks, host=True)  # made by the native library
        return blocks

    monkeypatch.setattr(store, "prepare_store", prepared)
    tiers = KVTiers.__new__(KVTiers)
    table = torch.arange(5 * 3 * PAGE).view(5, 3 * PAGE)
    tiers._scheduler = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table))
    tiers._page_size, tiers.stored = PAGE, stored
    requests = [
        SimpleNamespace(rid=name, req_pool_idx=row, origin_input_ids=range(prompt), output_ids=[1, 2])
        for row, (name, prompt) in enumerate([("a", 3), ("b", 5), ("c", 7)])
    ]
    for name in "abc":
        stored.adopt(name, torch.empty(0, dtype=torch.int64), 0)
    with syncs:
        tiers.write_through(requests)
    assert not syncs.take()
    assert [len(stored.store_blocks_of(name)) for name in "abc"] == [1, 0, 1], (
        "sequences whose last page is full have stored it"
    )
    stored.sync(wait=True)


def test_take_waits_for_blocks_of_ended_sequences_when_no_others_are_free(stored, store):
    for name in "abcdef":
        stored.adopt(name, torch.empty(0, dtype=torch.int64), 0)
        stored.write_through([name] * 2, torch.tensor([1, 2]))
        stored.forget(name)
    assert len(stored.take(store.num_blocks)) == store.num_blocks


def test_a_sequence_moves_to_another_rank_with_its_blocks_and_without_a_copy(pool):
    geometry = StoreGeometry.of_pool(pool, checksums=True)
    with (
        HostKVStore.create(geometry, num_bytes=12 * 4096, num_ranks=2) as here,
        HostKVStore.join(here.address, geometry, rank=1) as there,
    ):
        engines = [NativeCopyEngine(store, pool) for store in (here, there)]
        source, target = (
            StoredKV(store, engine, page_size=PAGE, layers=LAYERS, leased=6, counters=Counters())
            for store, engine in zip((here, there), engines, strict=True)
        )
        prompt(source, here, "a", 6)
        target.take_over("a", source.store_blocks_of("a"), 6)
        source.forget("a")
        assert (source.held, target.held) == (0, 2)
        before = [pool.page_parts(layer)[0][:2].clone() for layer in range(LAYERS)]
        target.restore("a", torch.tensor([20, 21])).wait()
        assert all(torch.equal(pool.page_parts(layer)[0][20:22], before[layer]) for layer in range(LAYERS))
        assert engines[0].counters().loaded_pages == 0
        target.forget("a")
        assert there.counts().free == there.num_blocks
        for engine in engines:
            engine.close()


def test_blocks_of_an_ended_sequence_count_to_the_ranks_share_until_their_copies_end(pool, counters):
    """Other ranks' shares are never touched, even if a copy ends late."""
    with HostKVStore.create(StoreGeometry.of_pool(pool), num_bytes=12 * 4096, num_ranks=2) as store:
        engine = NativeCopyEngine(store, pool)
        stored = StoredKV(store, engine, page_size=PAGE, layers=LAYERS, leased=6, counters=counters)
        for name in "abcdef":
            stored.adopt(name, torch.empty(0, dtype=torch.int64), 0)
            stored.write_through([name] * 3, torch.tensor([1, 2, 3]))
            stored.forget(name)
            assert store.counts().used <= 6
        engine.close()


def test_an_exclusive_store_frees_a_sequences_blocks_when_it_is_restored(store, pool, counters):
    engine = NativeCopyEngine(store, pool)
    stored = StoredKV(store, engine, page_size=PAGE, layers=LAYERS, leased=12, counters=counters, exclusive=True)
    stored.suspend(["a", "b"], [torch.tensor([7, 3, 9]), torch.tensor([5])], [9, 4])
    assert (stored.held, stored.free, store.counts().used) == (4, 8, 4)
    before = [pool.page_parts(layer)[0][[7, 3, 9]].clone() for layer in range(LAYERS)]
    stored.restore("a", torch.tensor([20, 21, 22])).wait()
    assert stored.held == 4, "until the copy has ended"
    stored.restored("a")
    assert all(torch.equal(pool.page_parts(layer)[0][20:23], before[layer]) for layer in range(LAYERS))
    assert (stored.held, store.counts().used) == (1, 1)
    stored.suspend(["a"], [torch.tensor([20, 21, 22, 23])], [13])
    assert counters.counts["pages_copied_to_suspend"] == 8
    for name in "ab":
        stored.forget(name)
    assert store.counts().free == store.num_blocks
    engine.close()


def test_measuring_the_copy_rate_changes_no_page_and_keeps_no_block(stored, store, pool):
    before = [pool.page_parts(layer)[0].clone() for layer in range(LAYERS)]
    assert stored.copy_rate(torch.arange(1, 9)) > 0
    assert store.counts().used == stored.held == 0
    assert all(torch.equal(pool.page_parts(layer)[0], before[layer]) for layer in range(LAYERS))
