"""Held memory is there, counts as free, and is freed as others take memory; its process ends with its parent."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sgl_batch.memory.held_memory import AHEAD_BYTES, PIECE_BYTES, HeldMemory, unused_bytes
from sgl_batch.memory.memory_holder import MemoryHolder

_WITHIN_S = 60.0
_MACHINE_BYTES = 1 << 40


class _Machine:
    """A machine of which others have taken `others` bytes, and `held` what it holds."""

    def __init__(self) -> None:
        self.others = 0
        self.held = HeldMemory(self.unused, ahead_bytes=PIECE_BYTES)

    def unused(self) -> int:
        return _MACHINE_BYTES - self.others - self.held.num_bytes


@pytest.fixture
def machine() -> _Machine:
    return _Machine()


def _lazily_freed(pid: int | str) -> int:
    """Return the bytes that a process has in memory and the kernel may take back."""
    found = re.search(r"LazyFree: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) << 10


def _wait_until(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _WITHIN_S
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.005)
    return is_so()


def test_what_is_held_is_in_memory_and_the_kernel_may_take_it_back() -> None:
    before, held = _lazily_freed("self"), HeldMemory()
    held.take(2 * PIECE_BYTES + 1)
    assert held.num_bytes == 2 * PIECE_BYTES
    assert _lazily_freed("self") - before == 2 * PIECE_BYTES
    assert held.free(1) == PIECE_BYTES
    assert _lazily_freed("self") - before == PIECE_BYTES
    assert held.free(10 * PIECE_BYTES) == PIECE_BYTES


def test_no_piece_is_taken_after_the_end() -> None:
    held = HeldMemory()
    held.take(4 * PIECE_BYTES, until=lambda: held.num_bytes == PIECE_BYTES)
    assert held.num_bytes == PIECE_BYTES
    held.free(PIECE_BYTES)


def test_some_is_freed_ahead_and_as_much_as_others_take(machine: _Machine) -> None:
    machine.held.take(4 * PIECE_BYTES)
    left = []

    def others_take() -> bool:
        left.append(machine.held.num_bytes // PIECE_BYTES)
        machine.others = PIECE_BYTES * max(0, len(left) - 2)
        return False

    machine.held.free_for_others(until=others_take)
    assert left[:4] == [4, 3, 3, 2]


def test_the_machine_has_unused_memory() -> None:
    assert 0 < unused_bytes() < psutil.virtual_memory().total


def test_a_holder_takes_memory_until_it_is_handed_over_and_ends_when_all_is_freed() -> None:
    with MemoryHolder(2 * PIECE_BYTES) as holder:
        assert holder.pid is not None
        process = psutil.Process(holder.pid)
        assert _wait_until(lambda: _lazily_freed(process.pid) == 2 * PIECE_BYTES)
        holder.hand_over()
        assert _wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE)
    assert not process.is_running()


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_a_holder_ends_with_its_block(*, is_handed_over: bool) -> None:
    with MemoryHolder(64 * PIECE_BYTES) as holder:
        assert holder.pid is not None
        process = psutil.Process(holder.pid)
        if is_handed_over:
            holder.hand_over()
    assert not process.is_running()
    holder.__exit__(None, None, None)


def test_nothing_is_held_of_no_bytes() -> None:
    with MemoryHolder(0) as holder:
        holder.hand_over()
    assert holder.pid is None


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_a_holder_ends_with_a_parent_that_is_killed(*, is_handed_over: bool) -> None:
    program = (
        "import time\n"
        "from sgl_batch.memory.memory_holder import MemoryHolder\n"
        f"holder = MemoryHolder({AHEAD_BYTES + 2 * PIECE_BYTES})\n"
        f"print(holder.pid, flush=True)\n"
        f"{'holder.hand_over()' if is_handed_over else ''}\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        holder = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
    assert _wait_until(lambda: not holder.is_running() or holder.status() == psutil.STATUS_ZOMBIE)
