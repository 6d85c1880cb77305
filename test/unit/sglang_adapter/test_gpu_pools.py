"""The pools of a GPU, on a CPU: pages are views of SGLang's rows by KV index, and redirected layers use other pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_batch.sglang_adapter.gpu_pools import GpuLatentPool, GpuPagePool

LAYERS, PAGE, PAGES = 3, 4, 5
SIZES: dict[str, Any] = {"page_size": PAGE, "dtype": torch.float32, "layer_num": LAYERS, "device": "cpu"}


def multi_head() -> GpuPagePool:
    return GpuPagePool(PAGES * PAGE, **SIZES, head_num=2, head_dim=8, enable_memory_saver=False)


def latent() -> GpuLatentPool:
    return GpuLatentPool(PAGES * PAGE, **SIZES, kv_lora_rank=6, qk_rope_head_dim=2, enable_memory_saver=False)


def rows(number: int) -> torch.Tensor:
    return torch.arange(number * 16.0).view(number, 2, 8)


@pytest.mark.parametrize("make", [multi_head, latent])
def test_pages_of_all_layers_lie_in_one_piece_and_are_the_layers_own_memory(make) -> None:
    pool = make()
    for layer in range(LAYERS):
        for part, whole in zip(pool.page_parts(layer), pool.all_parts, strict=True):
            assert part.shape[:2] == (PAGES + 1, PAGE)
            part[2] = 10 + layer
            assert torch.equal(whole[layer * (PAGES + 1) + 2], part[2])
        assert (pool.get_key_buffer(layer)[2 * PAGE : 3 * PAGE] == 10 + layer).all()
        assert (pool.get_key_buffer(layer)[3 * PAGE :] == 0).all()


@pytest.mark.parametrize("make", [multi_head, latent])
def test_redirected_layers_leave_their_own_pages_alone_until_they_are_restored(make) -> None:
    pool = make()
    own = [pool.page_parts(layer) for layer in range(LAYERS)]
    halves = [tuple(torch.full((9, *part.shape[1:]), 7.0) for part in own[0]) for _ in range(2)]
    pool.redirect([halves[layer % 2] for layer in range(LAYERS)], 100)
    assert pool.first_page == 100
    assert len(pool.get_key_buffer(1)) == 9 * PAGE
    pool.get_key_buffer(1)[33] = 1.0
    assert (halves[1][0][8, 1] == 1.0).all()
    pool.redirect(own, 0)
    assert pool.first_page == 0
    assert all((part == 0).all() for layer in range(LAYERS) for part in pool.page_parts(layer))


def test_rows_are_written_to_kv_indices_outside_of_the_pool() -> None:
    pool = multi_head()
    staged = tuple(torch.zeros(50, *part.shape[1:]) for part in pool.page_parts(0))
    pool.redirect([staged] * LAYERS, 100)
    slots = torch.tensor([0, 51, 199])
    pool.set_kv_buffer(SimpleNamespace(layer_id=2), slots, rows(3), -rows(3))
    assert torch.equal(staged[0].flatten(0, 1)[slots], rows(3))
    assert torch.equal(staged[1].flatten(0, 1)[slots], -rows(3))


def test_an_open_page_is_copied_to_another_in_every_layer() -> None:
    pool = multi_head()
    for layer in range(LAYERS):
        pool.set_kv_buffer(SimpleNamespace(layer_id=layer), torch.tensor([8, 9]), rows(2) + layer, rows(2) - layer)
    pool.move_kv_cache(torch.tensor([16, 17]), torch.tensor([8, 9]))
    for layer in range(LAYERS):
        keys, values = pool.get_kv_buffer(layer)
        assert torch.equal(keys[16:18], rows(2) + layer)
        assert torch.equal(values[16:18], rows(2) - layer)
