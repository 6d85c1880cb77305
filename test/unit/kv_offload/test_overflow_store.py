"""The overflow of a device without a store: made when first needed, grown by chunks, and given up without room."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sgl_batch.config import MemoryConfig
from sgl_batch.kv_offload import overflow_store
from sgl_batch.kv_offload.native_copy_engine import NativeCopyEngines
from sgl_batch.kv_offload.overflow_store import OverflowFile
from sgl_batch.metrics.counters import Counters

PAGE, LAYERS = 4, 3
BLOCK = 4096


@pytest.fixture
def pool():
    parts = [(torch.arange(40.0 * PAGE).view(40, PAGE) + 1000 * layer,) for layer in range(LAYERS)]
    return SimpleNamespace(layer_num=LAYERS, page_parts=lambda layer: parts[layer])


def overflow_in(
    directory: Path, pool, *, in_memory: bool = False, num_ranks: int = 1, counters: Counters | None = None
) -> OverflowFile:
    return OverflowFile(
        pool,
        MemoryConfig(kv_store_dir=str(directory)),
        counters or Counters(),
        lambda store: NativeCopyEngines(store, num_workers=1),
        page_size=PAGE,
        device_pages=5,
        num_ranks=num_ranks,
        in_memory=in_memory,
    )


def test_nothing_is_made_before_a_sequence_has_to_give_way(tmp_path, pool):
    overflow = overflow_in(tmp_path, pool)
    overflow.forget("a")
    assert overflow.stored is None
    overflow.close()


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_sequence_that_has_given_way_comes_back_as_it_was(in_memory, tmp_path, pool, caplog):
    caplog.set_level(logging.WARNING, logger=overflow_store.__name__)
    overflow = overflow_in(tmp_path, pool, in_memory=in_memory)
    assert overflow.has_room(3)
    before = [pool.page_parts(layer)[0][[7, 3, 9]].clone() for layer in range(LAYERS)]
    overflow.put(["a"], [torch.tensor([7, 3, 9])], [9])
    assert overflow.has_room(1)
    overflow.content.restore("a", torch.tensor([20, 21, 22])).wait()
    assert all(torch.equal(pool.page_parts(layer)[0][20:23], before[layer]) for layer in range(LAYERS))
    assert overflow.content.tokens_of("a") == 9
    overflow.forget("a")
    assert overflow.content.held == 0
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == (0 if in_memory else 1)
    assert in_memory or (str(tmp_path) in said[0] and "--admission" in said[0])
    overflow.close()


def test_the_file_grows_by_chunks_and_ends_with_the_disk(tmp_path, pool, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, logger=overflow_store.__name__)
    claimed = []

    def claim(descriptor: int, start: int, num_bytes: int) -> None:
        if num_bytes > 9 * BLOCK:
            raise OSError(28, "No space left on device")
        claimed.append(num_bytes // BLOCK)

    monkeypatch.setattr(overflow_store, "_CHUNK_BYTES", 4 * BLOCK)
    monkeypatch.setattr("os.posix_fallocate", claim)
    counters = Counters()
    overflow = overflow_in(tmp_path, pool, counters=counters)
    assert overflow.has_room(3)
    overflow.put(["a"], [torch.tensor([1, 2, 3])], [12])
    assert overflow.has_room(1)
    assert overflow.has_room(2)
    overflow.put(["b"], [torch.tensor([4, 5, 6])], [12])
    assert overflow.has_room(3), "a chunk more has no room, a block more has"
    assert claimed == [4, 8, 9]
    assert counters.counts["overflow_bytes"] == 9 * BLOCK
    assert not overflow.has_room(4)
    assert not overflow.has_room(4)
    assert overflow.has_room(3), "what is claimed stays"
    assert sum("No space left on device" in record.getMessage() for record in caplog.records) == 1
    overflow.close()


def test_on_a_full_disk_there_is_no_overflow(small_disk, pool, caplog):
    caplog.set_level(logging.WARNING, logger=overflow_store.__name__)
    (small_disk / "ballast").write_bytes(b"x" * ((8 << 20) - 2 * BLOCK))
    overflow = overflow_in(small_disk, pool)
    assert not overflow.has_room(5)
    overflow.close()
    assert any(str(small_disk) in record.getMessage() for record in caplog.records)


def test_on_a_small_disk_the_overflow_has_what_fits_there(small_disk, pool):
    overflow = overflow_in(small_disk, pool)
    assert overflow.has_room(1000)
    assert not overflow.has_room(2048), "a tenth of the disk stays free"
    overflow.close()


def test_ranks_share_what_is_free_on_a_disk(small_disk, pool):
    ranks = [overflow_in(small_disk, pool, num_ranks=2) for _ in range(2)]
    for rank in ranks:
        assert not rank.has_room(1000)
    fresh = [overflow_in(small_disk, pool, num_ranks=2) for _ in range(2)]
    assert all(rank.has_room(450) for rank in fresh)
    for rank in (*ranks, *fresh):
        rank.close()


def test_without_the_directory_there_is_no_overflow(tmp_path, pool):
    assert not overflow_in(tmp_path / "absent", pool).has_room(1)


def test_pages_of_another_form_stay_on_the_device(tmp_path):
    assert not overflow_in(tmp_path, SimpleNamespace(layer_num=LAYERS)).has_room(1)
