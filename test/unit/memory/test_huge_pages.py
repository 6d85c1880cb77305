"""Huge pages are asked for under weights before they are written.

Whether the kernel then gives any depends on what memory it has in one piece, so these tests look at what it was asked.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from sgl_batch.memory.huge_pages import huge_parameters, prefer_huge_pages

HUGE = 1 << 21


def bytes_asked_for(tensor: torch.Tensor) -> int:
    """Return for how many bytes of a tensor the kernel was asked to use huge pages. Raises OSError."""
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    found = overlap = 0
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
            overlap = max(0, min(end, last) - max(begin, first))
        elif name == "VmFlags:" and "hg" in values:
            found += overlap
    return found


@pytest.fixture
def _has_huge_pages() -> None:
    """Skip if the kernel does not know them, or does not tell what it was asked."""
    memory = mmap.mmap(-1, 5 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
        is_told = bytes_asked_for(torch.frombuffer(memory, dtype=torch.uint8)) == 5 * HUGE
    except OSError as error:
        pytest.skip(f"this kernel has no huge pages: {error}")
    if not is_told:
        pytest.skip("this kernel does not tell for what it was asked")


@pytest.mark.usefixtures("_has_huge_pages")
def test_huge_pages_are_asked_for_under_a_whole_tensor():
    # Fresh memory, since the C library may hand out some for which huge pages were asked before.
    memory = mmap.mmap(-1, 20 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    assert bytes_asked_for(tensor) == 0
    assert prefer_huge_pages(tensor)
    # The first and the last huge page are of other memory too, unless the tensor begins with one.
    assert 19 * HUGE <= bytes_asked_for(tensor) <= 20 * HUGE


@pytest.mark.usefixtures("_has_huge_pages")
def test_only_parameters_created_inside_get_huge_pages():
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Fresh memory, since the C library may hand out some for which huge pages were asked before.
            memory = mmap.mmap(-1, 5 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.weight = torch.nn.Parameter(torch.frombuffer(memory, dtype=torch.float32))
            self.register_parameter("bias", None)

    with huge_parameters():
        inside = Layer()
    outside = Layer()
    assert bytes_asked_for(inside.weight) >= 4 * HUGE
    assert bytes_asked_for(outside.weight) == 0


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(0), torch.zeros(HUGE // 4 - 1), torch.empty(3, HUGE).T, torch.empty(HUGE, device="meta")],
    ids=["none", "less than a page", "not in one piece", "not in memory"],
)
def test_tensors_that_cannot_have_huge_pages_are_left_alone(tensor):
    assert not prefer_huge_pages(tensor)
