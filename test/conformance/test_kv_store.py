"""A host KV store keeps its data, counts blocks and references, and refuses what a block's state forbids."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from store_cases import FORMS, Form, PlainPool, prepared, store_and_engine, stored
from store_model import ModelledStore

from sgl_batch.errors import ConfigError
from sgl_batch.kv_offload.host_kv_store import HostKVStore
from sgl_batch.kv_offload.native_copy_engine import NativeCopyEngine
from sgl_batch.kv_offload.store_errors import StoreFault
from sgl_batch.kv_offload.store_geometry import StoreGeometry
from sgl_batch.mem_cache.device_page_pool import DevicePagePool
from sgl_batch.mem_cache.latent_page_pool import LatentPagePool

pytest.importorskip("sgl_batch_kernel.kv_store")
PAGE, LAYERS = 8, 3


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_blocks_and_references_are_conserved_over_10000_random_operations(form: Form, tmp_path: Path) -> None:
    pool = PlainPool.random(layers=2, part_bytes=(64, 192))
    with store_and_engine(form, pool, tmp_path, num_blocks=24) as (store, engine):
        modelled = ModelledStore(store, engine, pool, seed=7)
        for _ in range(10_000):
            modelled.step()
        assert modelled.refusals > 500, "the operations rarely met a full store or a fault"
        assert engine.counters().errors == 0


def _pool(
    kind: str, layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> DevicePagePool | LatentPagePool:
    if layout == "plain":
        monkeypatch.setattr("sgl_batch.mem_cache.device_page_pool.native_kernels", lambda: None)
    if kind == "latent":
        return LatentPagePool(20 * PAGE, PAGE, dtype, 6, 2, LAYERS, "cpu", False)
    pool = DevicePagePool(20 * PAGE, PAGE, dtype, 2, 4, LAYERS, "cpu", False)
    assert pool.native_layout == (layout == "packed")
    return pool


@pytest.mark.parametrize("checksums", [False, True], ids=["bare", "checksums"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "layout"), [("heads", "packed"), ("heads", "plain"), ("latent", "rows")])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_pages_are_restored_bit_for_bit(
    form: Form,
    kind: str,
    layout: str,
    dtype: torch.dtype,
    checksums: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = _pool(kind, layout, dtype, monkeypatch)
    parts = [part for layer in range(LAYERS) for part in pool.page_parts(layer)]
    for part in parts:
        part.copy_(torch.randn(part.shape))
    before = [part.clone() for part in parts]
    geometry = StoreGeometry.of_pool(pool, checksums=checksums)
    with form.store(geometry, tmp_path, num_blocks=30) as store:
        engine = NativeCopyEngine(store, pool, num_workers=form.num_workers)
        sources, targets = torch.randperm(10) + 1, torch.randperm(10) + 11
        blocks = prepared(store, 10)
        for layer in range(LAYERS):
            engine.store_pages(range(layer, layer + 1), sources, blocks).wait()
        store.complete_store(blocks)
        engine.load_pages(range(LAYERS), blocks, targets).wait()
        engine.close()
    for part, old in zip(parts, before, strict=True):
        assert torch.equal(part[targets], old[sources])
        assert torch.equal(part[:11], old[:11]), "a page that is no target has changed"


def test_a_copy_of_some_layers_leaves_the_others_unchanged(tmp_path: Path) -> None:
    pool = PlainPool.random(layers=5)
    with store_and_engine(FORMS[0], pool, tmp_path) as (store, engine):
        blocks = stored(store, engine, [1])
        before = [part.clone() for part in pool.page(2)]
        engine.load_pages(range(1, 3), blocks, [2]).wait()
        source = pool.page(1)
        for index, part in enumerate(pool.page(2)):
            assert torch.equal(part, (source if 2 <= index < 6 else before)[index])


def test_more_layers_than_one_system_call_takes_are_stored(tmp_path: Path) -> None:
    pool = PlainPool.random(layers=700, part_bytes=(65, 3), pages=4)
    with store_and_engine(Form("file", 1), pool, tmp_path, checksums=True) as (store, engine):
        blocks = stored(store, engine, [1])
        engine.load_pages(range(700), blocks, [3]).wait()
        assert all(torch.equal(new, old) for new, old in zip(pool.page(3), pool.page(1), strict=True))


def test_prepare_store_takes_no_block_when_too_few_are_free(tmp_path: Path) -> None:
    with FORMS[0].store(StoreGeometry(num_layers=1, part_bytes=(64,)), tmp_path, num_blocks=4) as store:
        prepared(store, 3)
        assert store.prepare_store(2) is None
        assert store.counts().free == 1
        assert len(prepared(store, 1)) == 1
        assert store.counts().used == store.num_blocks


def test_a_store_fault_names_the_block_and_its_state(tmp_path: Path) -> None:
    with FORMS[0].store(StoreGeometry(num_layers=1, part_bytes=(64,)), tmp_path) as store:
        blocks = prepared(store, 2)
        store.free(blocks[:1])
        with pytest.raises(StoreFault, match=rf"slot {int(blocks[0])} \(FREE, 0 references"):
            store.free(blocks[:1])
        with pytest.raises(StoreFault, match=r"slot 40 of 40"):
            store.free([40])


def test_the_block_freed_last_is_taken_first(tmp_path: Path) -> None:
    with FORMS[0].store(StoreGeometry(num_layers=1, part_bytes=(64,)), tmp_path) as store:
        blocks = prepared(store, 10)
        store.free(blocks[3:5])
        assert sorted(prepared(store, 2).tolist()) == blocks[3:5].tolist()


@pytest.mark.parametrize("kind", ["memory", "shared", "file"])
def test_a_store_takes_no_memory_before_it_is_written(kind: str, tmp_path: Path) -> None:
    geometry = StoreGeometry(num_layers=4, part_bytes=(1 << 20, 1 << 20))
    with Form(kind, 1).store(geometry, tmp_path, num_blocks=512, num_ranks=2 if kind == "shared" else 1) as store:
        assert store.num_blocks * geometry.block_bytes == 1 << 32
        resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        prepared(store, 512)
        grown = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) - resident
        assert grown < 1024, f"{grown} pages of memory for blocks that were never written"


def test_a_stores_file_has_no_name_and_is_freed_with_the_store(tmp_path: Path) -> None:
    store = HostKVStore.create(StoreGeometry(num_layers=1, part_bytes=(4096,)), num_bytes=1 << 20, directory=tmp_path)
    data = Path(store.address.data_path)
    assert data.stat().st_size == 1 << 20
    assert list(tmp_path.iterdir()) == []
    store.close()
    assert not data.exists()
    store.close()


def test_a_store_too_small_for_a_page_is_refused_with_the_size_of_one() -> None:
    with pytest.raises(ConfigError, match=r"4095 bytes \(--kv-store-bytes\) holds no page: one takes 4096 bytes"):
        HostKVStore.create(StoreGeometry(num_layers=1, part_bytes=(64,)), num_bytes=4095)


def test_a_store_larger_than_the_machines_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="larger than the machine's memory"):
        HostKVStore.create(StoreGeometry(num_layers=1, part_bytes=(64,)), num_bytes=1 << 60)


def test_without_the_native_kernels_a_store_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl_batch.kernel_loader.native_kernels", lambda: None)
    with pytest.raises(ConfigError, match=r"needs the native kernels.*scripts/install"):
        HostKVStore.create(StoreGeometry(num_layers=1, part_bytes=(64,)), num_bytes=1 << 20)


def test_kernels_without_a_store_are_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sgl_batch_kernel.kv_store", None)
    monkeypatch.delattr("sgl_batch_kernel.kv_store", raising=False)
    with pytest.raises(ConfigError, match="or are of an older version"):
        HostKVStore.create(StoreGeometry(num_layers=1, part_bytes=(64,)), num_bytes=1 << 20)


def test_an_engine_for_pages_of_another_geometry_is_refused(tmp_path: Path) -> None:
    geometry = StoreGeometry.of_pool(PlainPool.random())
    with FORMS[0].store(geometry, tmp_path) as store:
        with pytest.raises(StoreFault, match="the store is for 40 contiguous pages of 4096 bytes"):
            NativeCopyEngine(store, PlainPool.random(part_bytes=(4096, 2048)))
        with pytest.raises(StoreFault, match="8 parts of device pages; the store is for 6"):
            NativeCopyEngine(store, PlainPool.random(layers=4))
