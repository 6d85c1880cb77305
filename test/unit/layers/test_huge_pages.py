"""Weights lie on huge pages from their first write on, where the kernel has them."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from sgl_batch.layers.huge_pages import huge_parameters, prefer_huge_pages

HUGE = 1 << 21
POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def bytes_on_huge_pages(tensor: torch.Tensor) -> int:
    """Of the mappings in which a tensor lies."""
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
            inside = begin < last and first < end
        elif inside and name == "AnonHugePages:":
            found += int(values[0]) * 1024
    return found


@pytest.fixture
def _given_here() -> None:
    """Skips where the kernel gives a plain request nothing: huge pages are off, or all memory is in pieces."""
    memory = mmap.mmap(-1, 5 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        pytest.skip(f"this kernel has no huge pages: {error}")
    tensor = torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    if not bytes_on_huge_pages(tensor):
        pytest.skip("the kernel gives no huge pages here")


# How many of them the kernel gives depends on what memory is in one piece: one at least shows that it was asked.
@pytest.mark.usefixtures("_given_here")
def test_a_tensor_that_is_asked_for_gets_huge_pages_when_it_is_written():
    tensor = torch.empty(20 * HUGE, dtype=torch.uint8)
    assert prefer_huge_pages(tensor)
    tensor.fill_(1)
    assert bytes_on_huge_pages(tensor) >= HUGE
    assert tensor.eq(1).all()


@pytest.mark.usefixtures("_given_here")
def test_parameters_created_inside_get_huge_pages_and_others_do_not():
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(5 * HUGE))
            self.register_parameter("bias", None)

    with huge_parameters():
        inside = Layer()
    outside = Layer()
    for layer in (inside, outside):
        layer.weight.data.fill_(1)
    assert bytes_on_huge_pages(inside.weight) >= HUGE
    if "[always]" not in POLICY.read_text(encoding="ascii"):
        assert bytes_on_huge_pages(outside.weight) == 0


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(0), torch.zeros(HUGE // 4 - 1), torch.empty(3, HUGE).T, torch.empty(HUGE, device="meta")],
    ids=["none", "less than a page", "not in one piece", "not in memory"],
)
def test_other_tensors_are_left_alone(tensor):
    assert not prefer_huge_pages(tensor)
