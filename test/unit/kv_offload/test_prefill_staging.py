"""A prefill group's KV goes to the store layer by layer, through two halves of memory, for all sub-batches."""

from __future__ import annotations

import itertools

import pytest
import torch
from copy_engines import ENGINES, keeps_checksums
from staged_pool import LAYERS, PAGE, WIDTH, StagedPool

from sgl_batch.kv_offload.host_kv_store import HostKVStore
from sgl_batch.kv_offload.native_copy_engine import NativeCopyEngine
from sgl_batch.kv_offload.prefill_staging import PrefillStaging
from sgl_batch.kv_offload.store_geometry import StoreGeometry

FIRST = 100
NONE = torch.empty(0, dtype=torch.int64)


@pytest.fixture
def pool() -> StagedPool:
    return StagedPool()


@pytest.fixture(params=ENGINES)
def kind(request):
    return request.param


@pytest.fixture
def store(pool, kind):
    geometry = StoreGeometry.of_pool(pool, checksums=keeps_checksums(kind))
    with HostKVStore.create(geometry, num_bytes=1 << 20) as made:
        yield made


@pytest.fixture
def staging(pool, store, kind):
    made = PrefillStaging(store, pool, ENGINES[kind](store), first_page=FIRST)
    yield made
    made.close()


def prefill(
    pool: StagedPool, staging: PrefillStaging, lengths: list[int], blocks: torch.Tensor, sub_batch: int
) -> None:
    """Do as a forward pass does: in each layer, write the rows of one sub-batch after the other."""
    staging.begin(lengths, blocks, restored=NONE)
    owner = [(sum(-(-n // PAGE) for n in lengths[:i]), at) for i, n in enumerate(lengths) for at in range(n)]
    for layer in range(LAYERS):
        for index, start in enumerate(range(0, len(owner), sub_batch)):
            staging.before_attention(layer, index)
            assert pool.first_page == FIRST
            rows = owner[start : start + sub_batch]
            for row, (first, at) in enumerate(rows, start):
                pool.page_parts(layer)[0][first + at // PAGE, at % PAGE] = 1000 * layer + row
            staging.after_attention(layer, index, start + len(rows))
            assert pool.first_page == 0, "between sub-batches the pool's layers point to its own pages"
    staging.end()


@pytest.mark.parametrize(("lengths", "sub_batch"), list(itertools.product([[1], [4, 5], [9, 3, 8, 1]], [1, 3, 64])))
def test_every_row_of_every_layer_arrives(pool, store, staging, lengths, sub_batch):
    own = [part.clone() for (part,) in pool.parts]
    pages = [-(-length // PAGE) for length in lengths]
    blocks = store.prepare_store(sum(pages))
    prefill(pool, staging, lengths, blocks, sub_batch)
    assert pool.first_page == 0
    assert all(torch.equal(part, before) for (part,), before in zip(pool.parts, own, strict=True)), "device pages stay"
    back = NativeCopyEngine(store, pool)
    back.load_pages(range(LAYERS), blocks, range(sum(pages))).wait()
    row = 0
    for length, first in zip(lengths, itertools.accumulate([0, *pages]), strict=False):
        for layer in range(LAYERS):
            found = pool.parts[layer][0][first : first + -(-length // PAGE)].flatten(0, 1)[:length, 0]
            assert found.tolist() == [1000 * layer + row + at for at in range(length)]
        row += length
    back.close()


def test_staging_takes_two_layers_of_the_largest_group(pool, store, staging):
    prefill(pool, staging, [40], store.prepare_store(10), 64)
    most = staging.peak_bytes
    assert most == 2 * 10 * PAGE * WIDTH * 4
    prefill(pool, staging, [3], store.prepare_store(1), 64)
    assert staging.peak_bytes == most


def test_blocks_are_ready_only_after_the_group_has_ended(pool, store, staging):
    blocks = store.prepare_store(2)
    staging.begin([5], blocks, restored=NONE)
    assert pool.first_page == 0
    staging.redirect_pool()
    assert pool.first_page == FIRST
    staging.restore_pool()
    assert pool.first_page == 0
    assert store.counts().ready == 0
    for layer in range(LAYERS):
        staging.before_attention(layer, 0)
        staging.after_attention(layer, 0, 5)
    staging.end()
    assert store.counts().ready == 2


def test_restored_pages_are_loaded_for_each_layer_and_stay_unchanged(pool, store, staging):
    before = store.prepare_store(3)
    prefill(pool, staging, [3 * PAGE], before, 64)
    blocks = store.prepare_store(2)
    restored = before[[2, 0]]
    staging.begin([5], blocks, restored=restored)
    for layer in range(LAYERS):
        staging.before_attention(layer, 0)
        found = pool.page_parts(layer)[0][:2].flatten(0, 1)[:, 0].tolist()
        assert found == [1000 * layer + row for row in (8, 9, 10, 11, 0, 1, 2, 3)]
        pool.page_parts(layer)[0][2:4] = 7.0 + layer
        staging.after_attention(layer, 0, 5)
    staging.end()
    assert store.references(torch.cat((before, blocks))).tolist() == [1] * 5
    back = NativeCopyEngine(store, pool)
    back.load_pages(range(LAYERS), torch.cat((before, blocks)), range(5)).wait()
    for layer in range(LAYERS):
        rows = pool.parts[layer][0][:5].flatten(0, 1)[:, 0].tolist()
        assert rows == [1000 * layer + row for row in range(3 * PAGE)] + [7.0 + layer] * (2 * PAGE)
    back.close()
