"""The pool of latent rows reads back what was written, moves it, and is read by page, KV index and part."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sgl_batch.errors import ConfigError
from sgl_batch.mem_cache.latent_page_pool import LatentPagePool

LATENT, ROPE, LAYERS, PAGE = 6, 2, 3, 8


def make(*, dtype=torch.float32, start_layer: int | None = None, latent: int = LATENT) -> LatentPagePool:
    end_layer = None if start_layer is None else start_layer + LAYERS
    return LatentPagePool(10 * PAGE, PAGE, dtype, latent, ROPE, LAYERS, "cpu", False, start_layer, end_layer)


def write(pool: LatentPagePool, layer: int, kv_indices: torch.Tensor) -> torch.Tensor:
    rows = torch.randn(len(kv_indices), 1, LATENT + ROPE, generator=torch.Generator().manual_seed(layer))
    pool.set_kv_buffer(SimpleNamespace(layer_id=layer), kv_indices, rows, rows[..., :LATENT])
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("start_layer", [None, 5])
def test_what_is_written_is_read_back_by_layer_and_kv_index(dtype, start_layer):
    pool, first = make(dtype=dtype, start_layer=start_layer), start_layer or 0
    kv_indices = torch.randperm(10 * PAGE)[:30] + PAGE
    written = {layer: write(pool, layer, kv_indices) for layer in range(first, first + LAYERS)}
    for layer, rows in written.items():
        keys, values = pool.read_kv(layer, kv_indices)
        assert torch.equal(keys, rows.to(dtype))
        assert torch.equal(values, rows[..., :LATENT].to(dtype))


def test_a_kv_index_is_page_times_page_size_plus_offset():
    pool = make()
    rows = write(pool, 1, torch.tensor([PAGE * 3 + 5]))
    assert torch.equal(pool.get_pages(1)[3, 5], rows[0, 0])
    assert torch.equal(pool.get_key_buffer(1)[PAGE * 3 + 5], rows[0])
    assert torch.equal(pool.get_value_buffer(1)[PAGE * 3 + 5], rows[0, :, :LATENT])
    keys, values = pool.pages_by_head(1)
    assert torch.equal(keys[3, 0, 5], rows[0, 0])
    assert values.shape == (11, 1, PAGE, LATENT)


def test_writing_touches_no_other_token_and_no_other_layer():
    pool, kv_indices = make(), torch.tensor([9, 70])
    write(pool, 1, kv_indices)
    others = torch.tensor([kv_index for kv_index in range(11 * PAGE) if kv_index not in kv_indices.tolist()])
    for layer, untouched in ((0, torch.arange(11 * PAGE)), (1, others), (2, torch.arange(11 * PAGE))):
        assert not pool.read_kv(layer, untouched)[0].any()


def test_sglangs_wrapped_write_location_is_accepted():
    pool, kv_indices = make(), torch.tensor([9, 70])
    rows = torch.ones(2, 1, LATENT + ROPE)
    pool.set_kv_buffer(SimpleNamespace(layer_id=0), KVWriteLoc(kv_indices, None), rows, None)
    assert torch.equal(pool.read_kv(0, kv_indices)[0], rows)


def test_a_move_copies_tokens_in_every_layer_and_leaves_the_source():
    pool, source, target = make(), torch.tensor([8, 9, 17]), torch.tensor([50, 51, 30])
    written = [write(pool, layer, source) for layer in range(LAYERS)]
    pool.move_kv_cache(target, source)
    for layer, rows in enumerate(written):
        for kv_indices in (source, target):
            assert torch.equal(pool.read_kv(layer, kv_indices)[0], rows)


def test_a_page_is_one_part_of_each_layer_and_its_size_counts_page_0():
    pool = make(dtype=torch.bfloat16)
    assert [part.shape[1:] for part in pool.page_parts(2)] == [(PAGE, LATENT + ROPE)]
    assert pool.page_parts(2)[0] is pool.get_pages(2)
    assert pool.get_kv_size_bytes() == LAYERS * 11 * PAGE * (LATENT + ROPE) * 2


@pytest.mark.parametrize(
    ("dtype", "latent", "native"), [(torch.bfloat16, 6, True), (torch.bfloat16, 7, False), (torch.float32, 7, True)]
)
def test_the_native_layout_needs_even_parts_of_bf16_rows(dtype, latent, native):
    assert make(dtype=dtype, latent=latent).native_layout is native


def test_a_model_with_an_indexer_is_refused():
    with pytest.raises(ConfigError, match="with an indexer"):
        LatentPagePool(PAGE, PAGE, torch.float32, LATENT, ROPE, LAYERS, "cpu", False, index_head_dim=128)
