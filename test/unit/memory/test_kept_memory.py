"""Large tensors take what was reserved, then what others freed, up to a limit. In processes of their own: it lasts."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from sgl_batch.kernel_loader import native_kernels

MIB = 1 << 20

_BEGIN = """
import resource, threading
import torch
from sgl_batch.kernel_loader import native_kernels
from sgl_batch.memory.kept_memory import keep_freed_memory
from sgl_batch.memory.process_memory import resident_bytes

MIB = 1 << 20
keep = native_kernels().keep_memory

def faults(num_bytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(num_bytes, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""


def run(program: str) -> str:
    command = [sys.executable, "-c", _BEGIN + program]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_next_tensor_takes_the_memory_of_the_last_one() -> None:
    program = """
faults(64 * MIB)
without = faults(64 * MIB)
keep_freed_memory()
faults(64 * MIB)
print(without, faults(64 * MIB), faults(60 * MIB), faults(30 * MIB))
"""
    without, same, smaller, too_small = map(int, run(program).split())
    assert without >= 32  # one for each huge page at least
    assert max(same, smaller) < 8
    assert too_small >= 15  # a tensor of half the size leaves it to others


def test_no_more_is_kept_than_the_limit() -> None:
    program = """
keep(128 * MIB)
tensors = [torch.empty(64 * MIB, dtype=torch.uint8).fill_(1) for _ in range(4)]
most = resident_bytes()
tensors.clear()
kept = resident_bytes()
keep(0)
print(most - kept, kept - resident_bytes())
"""
    gone, last = map(int, run(program).split())
    assert gone == pytest.approx(128 * MIB, abs=16 * MIB)
    assert last == pytest.approx(128 * MIB, abs=16 * MIB)


def test_tensors_of_all_sizes_keep_their_values_in_all_threads() -> None:
    program = """
before = torch.arange(MIB)
keep(64 * MIB)
small = torch.arange(10)
large = torch.arange(4 * MIB)
large.resize_(16 * MIB)
wrong = []

def work(number):
    for size in [1, 1000, MIB, 3 * MIB, 5 * MIB] * 10:
        tensor = torch.full((size,), number)
        copy = tensor.clone()
        if not bool((copy == number).all()):
            wrong.append((number, size))

threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(wrong), int(before.sum()), int(small.sum()), int(large[: 4 * MIB].sum()), len(torch.empty(0)))
"""
    found = [int(number) for number in run(program).split()]
    assert found == [0, *(int(torch.arange(size).sum()) for size in (MIB, 10, 4 * MIB)), 0]


def test_tensors_take_what_was_reserved_and_then_new_memory() -> None:
    program = """
faults(32 * MIB)
keep(1024 * MIB)
given = native_kernels().reserve_memory(63 * MIB, 60.0, 2)
tensors, counts = [], []
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors.append(torch.empty(32 * MIB, dtype=torch.uint8).fill_(1))
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(given, *counts)
"""
    given, first, second, third = map(int, run(program).split())
    assert given == 64 * MIB  # whole huge pages
    assert max(first, second) < 8
    assert third >= 16


def test_freed_pieces_of_a_reserve_and_what_a_new_one_replaces_go_back() -> None:
    program = """
keep(0)
reserve, before = native_kernels().reserve_memory, resident_bytes()
reserve(128 * MIB, 60.0, 2)
reserved = resident_bytes()
tensor = torch.empty(64 * MIB, dtype=torch.uint8).fill_(1)
used = resident_bytes()
del tensor
freed = resident_bytes()
reserve(0, 60.0, 2)
print(reserved - before, used - reserved, used - freed, freed - resident_bytes())
"""
    reserved, used, freed, replaced = map(int, run(program).split())
    assert reserved == pytest.approx(128 * MIB, abs=16 * MIB)
    assert used == pytest.approx(0, abs=16 * MIB)
    assert freed == pytest.approx(64 * MIB, abs=16 * MIB)
    assert replaced == pytest.approx(64 * MIB, abs=16 * MIB)


def test_a_reserve_is_only_what_was_given_in_time() -> None:
    program = """
keep(1024 * MIB)
given = native_kernels().reserve_memory(1 << 40, 0.05, 2)
tensor = torch.full((16 * MIB,), 7)
print(given, int((tensor == 7).all()))
"""
    given, is_whole = map(int, run(program).split())
    assert given < 64 << 30
    assert given % (2 * MIB) == 0
    assert is_whole == 1


def test_numbers_below_their_least_are_refused() -> None:
    kernels = native_kernels()
    assert kernels is not None
    with pytest.raises(RuntimeError, match="at most -1 bytes"):
        kernels.keep_memory(-1)
    with pytest.raises(RuntimeError, match="-1 bytes are to be reserved by 2 threads"):
        kernels.reserve_memory(-1, 1.0, 2)
    with pytest.raises(RuntimeError, match="0 bytes are to be reserved by 0 threads"):
        kernels.reserve_memory(0, 1.0, 0)
