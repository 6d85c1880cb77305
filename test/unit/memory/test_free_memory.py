"""A process may still take what the tightest of its machine and its control groups leaves."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sgl_batch.memory.free_memory import free_bytes, give_back
from sgl_batch.memory.process_memory import resident_bytes

MACHINE = 8 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", f"MemTotal: 99999999 kB\nMemAvailable:   {MACHINE // 1024} kB\n")
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def second(directory: Path, limit: int | str, used: int, files: tuple[int, int] = (0, 0), mapped: int = 0) -> None:
    write(directory / "memory.max", f"{limit}\n")
    write(directory / "memory.current", f"{used}\n")
    write(
        directory / "memory.stat",
        f"anon 7\ninactive_file {files[0]}\nactive_file {files[1]}\nfile_mapped {mapped}\n",
    )


def test_without_control_groups_the_machines_memory_counts(root: Path) -> None:
    assert free_bytes(root) == MACHINE
    write(root / "proc/self/cgroup", "3:cpu:/a\n0::/a/b\n")
    assert free_bytes(root) == MACHINE


def test_the_tightest_of_nested_control_groups_counts(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/a/b\n")
    mount = root / "sys/fs/cgroup"
    second(mount / "a/b", "max", 5)
    second(mount / "a", 1000, 400)
    assert free_bytes(root) == 600
    second(mount / "a/b", 500, 450)
    assert free_bytes(root) == 50
    second(mount / "a/b", 500, 600)
    assert free_bytes(root) == 0


def test_unmapped_cached_files_count_as_free(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    second(root / "sys/fs/cgroup", 1000, 900, files=(300, 200), mapped=120)
    assert free_bytes(root) == 100 + 380
    second(root / "sys/fs/cgroup", 1000, 900, files=(30, 20), mapped=120)
    assert free_bytes(root) == 100


def test_cgroup_v1_counts_nested_groups(root: Path) -> None:
    write(root / "proc/self/cgroup", "9:name=systemd:/x\n4:cpu,memory:/job\n0::/\n")
    job = root / "sys/fs/cgroup/memory/job"
    write(job / "memory.limit_in_bytes", "2000\n")
    write(job / "memory.usage_in_bytes", "700\n")
    write(
        job / "memory.stat",
        "inactive_file 1\nactive_file 1\nmapped_file 1\n"
        "total_inactive_file 50\ntotal_active_file 20\ntotal_mapped_file 10\n",
    )
    assert free_bytes(root) == 1300 + 60


def test_memory_that_this_process_takes_is_not_free() -> None:
    size = 512 << 20
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        before = free_bytes()
        memory[:: mmap.PAGESIZE] = b"x" * (size // mmap.PAGESIZE)
        if within(5, lambda: free_bytes() < before - size // 4):
            return
        taken = free_bytes()
    # Some kernels count only every few seconds, so that the first value may have been one from before.
    assert within(30, lambda: free_bytes() > taken + size // 4)


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return held


def test_memory_that_is_given_back_is_free_and_zero() -> None:
    tensor = torch.full((64 << 20,), 7, dtype=torch.uint8)
    before = resident_bytes()
    give_back(tensor[mmap.PAGESIZE // 2 :])
    assert resident_bytes() < before - (60 << 20)
    assert tensor[: mmap.PAGESIZE // 2].eq(7).all(), "memory that is not given back is kept"
    assert tensor[2 * mmap.PAGESIZE] == 0
    give_back(tensor[:0])
