"""The memory of a pool's first pages is taken in their order, as much as was allowed, and nothing breaks without it."""

from __future__ import annotations

import ctypes
import mmap
import time

import pytest
import torch

from sgl_batch.mem_cache.device_page_pool import DevicePagePool, lazy_layers
from sgl_batch.mem_cache.latent_page_pool import LatentPagePool
from sgl_batch.mem_cache.memory_ahead import MemoryAhead, most_bytes_ahead
from sgl_batch.memory.page_advice import populate

HUGE = 2 << 20
LAYERS = 3

_libc = ctypes.CDLL(None)


def resident_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the memory pages under a tensor that are in memory."""
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - first
    found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert _libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(size), found) == 0
    return sum(state & 1 for state in found) * mmap.PAGESIZE


def layers(*, pages: int, page_bytes: int = HUGE // 4) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return memory of all layers, none of it taken yet, and each layer's part."""
    return lazy_layers(LAYERS, (pages, page_bytes), torch.uint8)


def take_all(ahead: MemoryAhead) -> int:
    """Return in how many steps it has taken all."""
    steps = 0
    while ahead.step():
        steps += 1
    return steps


@pytest.fixture
def _populates() -> None:
    if not populate(layers(pages=1)[0]):
        pytest.skip("the kernel gives no memory ahead (Linux 5.14 does)")


@pytest.mark.usefixtures("_populates")
def test_the_stated_bytes_are_in_memory_and_no_more():
    whole, parts = layers(pages=40)
    ahead = MemoryAhead(parts, 7 * HUGE + 1)
    assert resident_bytes(whole) == 0
    assert take_all(ahead) == 7
    assert ahead.taken_bytes == resident_bytes(whole) == 7 * HUGE


@pytest.mark.usefixtures("_populates")
def test_what_was_written_before_stays():
    whole, parts = layers(pages=40)
    whole.fill_(7)
    take_all(MemoryAhead(parts, whole.nbytes))
    assert bool((whole == 7).all())


@pytest.mark.usefixtures("_populates")
def test_nothing_is_taken_between_two_steps():
    whole, parts = layers(pages=40)
    ahead = MemoryAhead(parts, whole.nbytes)
    for number in range(1, 4):
        assert ahead.step()
        assert resident_bytes(whole) == number * HUGE


def test_pieces_come_from_each_layer_in_turn_from_the_first_page_on():
    _, parts = layers(pages=40)
    taken: list[torch.Tensor] = []
    take_all(MemoryAhead(parts, 6 * HUGE, give=lambda piece: taken.append(piece) is None))
    first, second = taken[:LAYERS], taken[LAYERS:]
    for part, one, two in zip(parts, first, second, strict=True):
        assert 0 <= one.data_ptr() - part.data_ptr() < HUGE
        assert two.data_ptr() == one.data_ptr() + HUGE


def test_a_piece_is_one_huge_page_within_its_layer():
    _, parts = layers(pages=7, page_bytes=HUGE // 2 - 64)
    taken: list[torch.Tensor] = []
    take_all(MemoryAhead(parts, 1 << 40, give=lambda piece: taken.append(piece) is None))
    assert len(taken) == len({piece.data_ptr() for piece in taken}) >= 2 * LAYERS
    for piece in taken:
        assert (piece.nbytes, piece.data_ptr() % HUGE) == (HUGE, 0)
        assert any(
            part.data_ptr() <= piece.data_ptr() and piece.data_ptr() + HUGE <= part.data_ptr() + part.nbytes
            for part in parts
        )


def test_a_kernel_that_gives_no_memory_ahead_is_asked_once():
    asked: list[torch.Tensor] = []

    def refuse(piece: torch.Tensor) -> bool:
        asked.append(piece)
        return False

    whole, parts = layers(pages=40)
    ahead = MemoryAhead(parts, whole.nbytes, give=refuse)
    assert not ahead.step()
    assert not ahead.step()
    assert (len(asked), ahead.taken_bytes, resident_bytes(whole)) == (1, 0, 0)


@pytest.mark.parametrize("most_bytes", [0, HUGE - 1])
def test_less_than_a_huge_page_takes_nothing(most_bytes):
    assert not MemoryAhead(layers(pages=40)[1], most_bytes).step()


def test_parts_smaller_than_a_huge_page_and_no_parts_take_nothing():
    assert not MemoryAhead(layers(pages=1)[1], 1 << 30).step()
    assert not MemoryAhead([], 1 << 30).step()


@pytest.mark.usefixtures("_populates")
@pytest.mark.parametrize("latent", [False, True])
def test_the_pages_of_every_pool_can_be_taken(latent):
    pages, page_size = 128, 64  # some whole huge pages in each part, wherever it begins
    pool = (
        LatentPagePool(pages * page_size, page_size, torch.bfloat16, 512, 64, LAYERS, "cpu", False)
        if latent
        else DevicePagePool(pages * page_size, page_size, torch.bfloat16, 8, 64, LAYERS, "cpu", False)
    )
    parts = [part for layer in range(LAYERS) for part in pool.page_parts(layer)]
    ahead = MemoryAhead(parts, 4 * HUGE)
    assert take_all(ahead) == 4
    assert sum(resident_bytes(part) for part in pool.all_parts) == 4 * HUGE


def test_ranks_share_a_sixteenth_of_the_free_memory():
    needs = {"page_bytes": 1 << 20, "most_pages": 1 << 20, "weight_bytes": 1 << 40}
    assert most_bytes_ahead(32 << 30, num_ranks=1, **needs) == 2 << 30
    assert most_bytes_ahead(32 << 30, num_ranks=4, **needs) == 512 << 20


def test_no_more_is_taken_than_the_largest_batch_needs():
    assert (
        most_bytes_ahead(32 << 30, num_ranks=1, page_bytes=1 << 20, most_pages=100, weight_bytes=1 << 40) == 100 << 20
    )


def test_no_more_is_taken_than_weights_take():
    assert most_bytes_ahead(32 << 30, num_ranks=1, page_bytes=1 << 20, most_pages=100, weight_bytes=7 << 20) == 7 << 20


def test_what_a_start_takes_is_bounded_by_time():
    taken: list[int] = []

    def give(piece: torch.Tensor) -> bool:
        taken.append(piece.nbytes)
        time.sleep(0.01)
        return True

    ahead = MemoryAhead(layers(pages=400)[1], 200 * HUGE, give=give)
    ahead.take_for(0.0, 1)
    assert not taken
    ahead.take_for(0.05, 1)
    assert 1 <= len(taken) <= 5
    ahead.take_for(60.0, 3)
    assert ahead.taken_bytes == sum(taken) == 200 * HUGE
