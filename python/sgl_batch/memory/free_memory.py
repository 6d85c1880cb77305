"""Owns reading how much memory this process may still take before the kernel kills, and giving memory back to it."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from sgl_batch.memory.page_advice import advise

_ROOT = Path("/")
_libc = ctypes.CDLL(None)


def give_back_heap() -> None:
    """Let the kernel have what the C library keeps of memory that was freed; takes milliseconds."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def give_back(tensor: torch.Tensor) -> None:
    """Let the kernel have the memory of a contiguous CPU tensor whose values nobody needs; new pages come when written.

    Pages that it shares with others stay. Only for anonymous memory, which is what torch allocates.
    """
    advise(tensor, mmap.MADV_DONTNEED)


def free_bytes(root: Path = _ROOT) -> int:
    """What is left of the machine's memory, or of that of a control group that this process is in, if that is less.

    Files' pages that no process has mapped count as free, for the kernel takes them back.
    """
    # A group may be seen by its name or, inside a container, as the root of what is mounted.
    found = [_of_machine(root), *(left for group in _groups(root) if (left := _of_group(group)) is not None)]
    return max(0, min(found))


def _of_machine(root: Path) -> int:
    return 1024 * _numbers(root / "proc/meminfo")["MemAvailable"]


def _groups(root: Path) -> Iterator[Path]:
    """The directories of this process's control groups for memory, from its own up to the first."""
    mounts = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = mounts / "memory" if controllers else mounts
        group = mount / name.lstrip("/")
        yield from (directory for directory in (group, *group.parents) if directory.is_relative_to(mount))


def _of_group(group: Path) -> int | None:
    """What a group's limit leaves; None where it has none."""
    second = (group / "memory.max").exists()
    names = ("memory.max", "memory.current") if second else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    try:
        limit, used = ((group / name).read_text(encoding="ascii").strip() for name in names)
        stat = _numbers(group / "memory.stat")
    except OSError:
        return None
    if limit == "max":
        return None
    total = "" if second else "total_"
    files = stat.get(f"{total}inactive_file", 0) + stat.get(f"{total}active_file", 0)
    mapped = stat.get("file_mapped" if second else "total_mapped_file", 0)
    return int(limit) - int(used) + max(0, files - mapped)


def _numbers(file: Path) -> dict[str, int]:
    """`name number` of each line, with or without a colon and a unit."""
    return {
        name: int(number) for name, number in re.findall(r"(?m)^(\S+?):?\s+(\d+)", file.read_text(encoding="ascii"))
    }
