"""A file lies under a tensor for all who map it, or only until this process writes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from sgl_batch.memory.page_advice import HUGE_PAGE_BYTES
from sgl_batch.memory.page_mapping import fill_with_huge_page, map_file, map_own, reserved, written_ranges


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 2 * HUGE_PAGE_BYTES)
    yield descriptor
    os.close(descriptor)


def test_reserved_memory_is_whole_huge_pages():
    memory = reserved(HUGE_PAGE_BYTES + 1)
    assert len(memory) == 2 * HUGE_PAGE_BYTES
    assert memory.data_ptr() % HUGE_PAGE_BYTES == 0
    assert not memory.any()


def test_what_is_written_to_a_shared_mapping_is_in_the_file_and_in_other_mappings(file):
    one, other = reserved(HUGE_PAGE_BYTES), reserved(HUGE_PAGE_BYTES)
    map_file(one, file, shared=True)
    map_file(other, file, shared=False)
    one[5] = 7
    assert os.pread(file, 1, 5) == b"\x07"
    assert other[5] == 7


def test_what_is_written_to_a_mapping_that_is_not_shared_stays_there(file):
    memory = reserved(HUGE_PAGE_BYTES)
    map_file(memory, file, shared=False)
    memory[5] = 7
    assert memory[5] == 7
    assert os.pread(file, 1, 5) == b"\x00"


def test_own_memory_replaces_a_file_at_the_same_addresses(file):
    memory = reserved(HUGE_PAGE_BYTES)
    map_file(memory, file, shared=True)
    memory[5] = 7
    map_own(memory)
    assert not memory.any()
    assert os.pread(file, 1, 5) == b"\x07"


def test_the_written_ranges_of_a_file_are_those_with_memory(file):
    assert list(written_ranges(file)) == []
    os.pwrite(file, b"x", HUGE_PAGE_BYTES + 3)
    assert [first for first, _ in written_ranges(file)] == [HUGE_PAGE_BYTES]


def test_a_huge_page_keeps_what_was_written(file):
    memory = reserved(HUGE_PAGE_BYTES)
    map_file(memory, file, shared=True)
    memory[1::7] = torch.arange(len(memory[1::7])).to(torch.uint8)
    before = memory.clone()
    fill_with_huge_page(memory)
    assert torch.equal(memory, before)


def test_a_file_that_cannot_be_mapped_is_an_error():
    with pytest.raises(OSError, match="2 MiB cannot be mapped"):
        map_file(reserved(1), 1 << 20, shared=True)
