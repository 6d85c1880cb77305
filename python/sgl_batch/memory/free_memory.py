"""Owns reading how much memory this process may still take before the kernel kills it, and giving memory back."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_batch.memory.page_advice import advise

if TYPE_CHECKING:
    import torch

_ROOT = Path("/")
_libc = ctypes.CDLL(None)


def give_back_heap() -> None:
    """Give the kernel the freed memory that the C library keeps; takes milliseconds."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def give_back(tensor: torch.Tensor) -> None:
    """Give the kernel the memory of a contiguous CPU tensor whose values are not needed; writes take new pages.

    Memory pages that the tensor shares with others stay. Only for anonymous memory, which torch allocates.
    """
    advise(tensor, mmap.MADV_DONTNEED)


def machine_bytes() -> int:
    """Return the bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_bytes(root: Path = _ROOT) -> int:
    """Return the bytes left of the machine's memory, or of a control group's that this process is in, if less.

    Cached files that no process has mapped count as free, because the kernel takes them back.
    """
    # Inside a container, a group may be at the root of the mount and not under its name.
    found = [_of_machine(root), *(left for group in _groups(root) if (left := _of_group(group)) is not None)]
    return max(0, min(found))


def _of_machine(root: Path) -> int:
    return 1024 * _numbers(root / "proc/meminfo")["MemAvailable"]


def _groups(root: Path) -> Iterator[Path]:
    """Yield the directories of this process's control groups for memory, from its own up to the root."""
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
    """Return the bytes that a group's limit leaves; None if it has no limit."""
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
    """Return the numbers of a file of lines `name number`, with or without a colon and a unit."""
    return {
        name: int(number) for name, number in re.findall(r"(?m)^(\S+?):?\s+(\d+)", file.read_text(encoding="ascii"))
    }
