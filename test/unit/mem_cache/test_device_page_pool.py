"""The pool reads back what was written, moves it, and takes memory only when written to."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sgl_batch.mem_cache.device_page_pool import DevicePagePool

HEADS, DIM, LAYERS = 2, 4, 3


def make(*, pages: int = 10, page_size: int = 8, dtype=torch.float32, start_layer: int | None = None):
    end_layer = None if start_layer is None else start_layer + LAYERS
    return DevicePagePool(pages * page_size, page_size, dtype, HEADS, DIM, LAYERS, "cpu", False, start_layer, end_layer)


def draw(seed: int, tokens: int) -> torch.Tensor:
    return torch.randn(tokens, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


def write(pool: DevicePagePool, layer: int, kv_indices: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = draw(seed, len(kv_indices)), draw(seed + 1000, len(kv_indices))
    pool.set_kv_buffer(SimpleNamespace(layer_id=layer), kv_indices, k, v)
    return k, v


def some_kv_indices(seed: int, count: int, pages: int = 10, page_size: int = 8) -> torch.Tensor:
    return torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(seed))[:count] + page_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("start_layer", [None, 5])
def test_what_is_written_is_read_back_by_layer_and_kv_index(dtype, start_layer):
    pool, first = make(dtype=dtype, start_layer=start_layer), start_layer or 0
    written = {
        layer: (some_kv_indices(layer, 30), *write(pool, layer, some_kv_indices(layer, 30), layer))
        for layer in range(first, first + LAYERS)
    }
    for layer, (kv_indices, k, v) in written.items():
        order = torch.randperm(30)
        keys, values = pool.read_kv(layer, kv_indices[order])
        assert torch.equal(keys, k[order].to(dtype))
        assert torch.equal(values, v[order].to(dtype))


def test_the_first_layer_that_a_process_holds_is_the_first_of_its_buffers():
    pool = make(start_layer=5)
    assert pool.get_key_buffer(5) is pool.k_pages[0]
    assert pool.get_value_buffer(7) is pool.v_pages[2]


def test_a_kv_index_is_page_times_page_size_plus_offset_with_heads_before_tokens(monkeypatch):
    monkeypatch.setattr("sgl_batch.mem_cache.device_page_pool.native_kernels", lambda: None)
    pool = make()
    k, v = write(pool, 1, torch.tensor([8 * 3 + 5]), 0)
    assert pool.get_key_buffer(1).shape == (11, HEADS, 8, DIM)
    assert torch.equal(pool.get_key_buffer(1)[3, :, 5], k[0])
    assert torch.equal(pool.get_value_buffer(1)[3, :, 5], v[0])


def test_writing_touches_no_other_token_and_no_other_layer():
    pool = make()
    kv_indices = some_kv_indices(0, 20)
    write(pool, 1, kv_indices, 0)
    others = torch.tensor([kv_index for kv_index in range(8 * 11) if kv_index not in kv_indices.tolist()])
    for layer, untouched in ((0, torch.arange(8 * 11)), (1, others), (2, torch.arange(8 * 11))):
        keys, values = pool.read_kv(layer, untouched)
        assert not keys.any()
        assert not values.any()


def test_sglangs_wrapped_write_location_is_accepted():
    pool, kv_indices = make(), torch.tensor([9, 70])
    k, v = draw(0, 2), draw(1, 2)
    pool.set_kv_buffer(SimpleNamespace(layer_id=0), KVWriteLoc(kv_indices, None), k, v)
    keys, values = pool.read_kv(0, kv_indices)
    assert torch.equal(keys, k)
    assert torch.equal(values, v)


def test_what_is_read_is_a_copy():
    pool, kv_indices = make(), torch.tensor([9])
    k, _ = write(pool, 0, kv_indices, 0)
    pool.read_kv(0, kv_indices)[0].zero_()
    assert torch.equal(pool.read_kv(0, kv_indices)[0], k)


def test_a_move_copies_tokens_in_every_layer_and_leaves_the_source():
    pool = make()
    source, target = torch.tensor([8, 9, 17]), torch.tensor([50, 51, 30])
    written = [write(pool, layer, source, layer) for layer in range(LAYERS)]
    pool.move_kv_cache(target, source)
    for layer, (k, v) in enumerate(written):
        for kv_indices in (source, target):
            keys, values = pool.read_kv(layer, kv_indices)
            assert torch.equal(keys, k)
            assert torch.equal(values, v)


def test_its_size_counts_page_0_and_both_halves():
    assert make(dtype=torch.bfloat16).get_kv_size_bytes() == (LAYERS * 11 * 8 * HEADS * DIM * 2,) * 2


def test_a_large_pool_takes_memory_only_where_it_is_written():
    process, page_size, heads, dim, layers = psutil.Process(), 64, 8, 128, 4
    tokens = 4 * 2**30 // (layers * 2 * heads * dim * 2)
    before = process.memory_info().rss
    pool = DevicePagePool(tokens, page_size, torch.bfloat16, heads, dim, layers, "cpu", False)
    assert sum(pool.get_kv_size_bytes()) > 4 * 2**30
    assert process.memory_info().rss - before < 50 * 2**20
    rows = torch.ones(page_size, heads, dim)
    kv_indices = torch.arange(page_size) + tokens
    pool.set_kv_buffer(SimpleNamespace(layer_id=3), kv_indices, rows, rows)
    keys, _ = pool.read_kv(3, torch.cat((kv_indices, kv_indices - 64 * page_size)))
    assert keys[:page_size].eq(1).all()
    assert keys[page_size:].eq(0).all()
    assert process.memory_info().rss - before < 50 * 2**20
