"""The memory that a process takes is what the kernel reports."""

from __future__ import annotations

import mmap

from sgl_batch.memory.process_memory import forget_peak, peak_resident_bytes, resident_bytes

SIZE = 64 << 20


def claim() -> None:
    """Take memory and free it."""
    with mmap.mmap(-1, SIZE) as memory:
        for page in range(0, SIZE, mmap.PAGESIZE):
            memory[page] = 1


def test_the_peak_includes_freed_memory_until_it_is_reset():
    forget_peak()
    before = resident_bytes()
    claim()
    assert resident_bytes() < before + SIZE
    peak = peak_resident_bytes()
    assert peak > before + SIZE * 3 // 4
    forget_peak()
    assert peak_resident_bytes() < peak - SIZE // 2
