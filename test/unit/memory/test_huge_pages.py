"""Weights lie on huge pages from their first write on, if the kernel has them."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from sgl_batch.memory.huge_pages import huge_parameters, prefer_huge_pages

HUGE = 1 << 21
_TRIES = 5
POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def bytes_on_huge_pages(tensor: torch.Tensor) -> int:
    """Return the bytes on huge pages in the mappings of a tensor."""
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
    """Skip if the kernel gives a plain request no huge page: they are off, or memory is fragmented."""
    try:
        is_given = bytes_on_huge_pages(plain_request()) > 0
    except OSError as error:
        pytest.skip(f"this kernel has no huge pages: {error}")
    if not is_given:
        pytest.skip("the kernel gives no huge pages here")


def plain_request() -> torch.Tensor:
    """Return written memory for which huge pages were asked without the module under test. Raises OSError."""
    memory = mmap.mmap(-1, 5 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).fill_(1)


def compacted() -> None:
    """Let the kernel compact its memory, if this process may ask for that."""
    with suppress(OSError):
        Path("/proc/sys/vm/compact_memory").write_text("1", encoding="ascii")


def some_get(make: Callable[[], torch.Tensor]) -> bool:
    """Return whether one of a few tensors gets huge pages when they are written.

    How many the kernel gives depends on what memory is in one piece; one shows that it was asked. Skip if a plain
    request, made after each of them, gets none either.
    """
    kept, plain = [], []
    for _ in range(_TRIES):
        kept.append(make().fill_(1))
        if bytes_on_huge_pages(kept[-1]) >= HUGE:
            return True
        plain.append(plain_request())
        compacted()
    if not any(map(bytes_on_huge_pages, plain)):
        pytest.skip("the kernel has run out of huge pages")
    return False


@pytest.mark.usefixtures("_given_here")
def test_a_tensor_gets_huge_pages_when_it_is_written():
    def asked_for() -> torch.Tensor:
        tensor = torch.empty(20 * HUGE, dtype=torch.uint8)
        assert prefer_huge_pages(tensor)
        return tensor

    assert some_get(asked_for)


@pytest.mark.usefixtures("_given_here")
def test_only_parameters_created_inside_get_huge_pages():
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Fresh memory, since the C library may hand out some for which huge pages were asked before.
            memory = mmap.mmap(-1, 5 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.weight = torch.nn.Parameter(torch.frombuffer(memory, dtype=torch.float32))
            self.register_parameter("bias", None)

    def inside() -> torch.Tensor:
        with huge_parameters():
            return Layer().weight.data

    assert some_get(inside)
    outside = Layer().weight.data.fill_(1)
    if "[always]" not in POLICY.read_text(encoding="ascii"):
        assert bytes_on_huge_pages(outside) == 0


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(0), torch.zeros(HUGE // 4 - 1), torch.empty(3, HUGE).T, torch.empty(HUGE, device="meta")],
    ids=["none", "less than a page", "not in one piece", "not in memory"],
)
def test_tensors_that_cannot_have_huge_pages_are_left_alone(tensor):
    assert not prefer_huge_pages(tensor)
