"""Owns the description of the machine and of the source that a measurement was made with."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from sgl_batch.processor import read_processor

# The flags that decide how fast a CPU multiplies in bf16 and int8.
_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
_GPU_QUERY = "--query-gpu=name,memory.total,driver_version"


def gpu_text(line: str) -> str:
    """Return a GPU as nvidia-smi describes it: name, memory, driver."""
    *known, driver = line.split(", ")
    return ", ".join([*known, f"driver {driver}"])


def hardware() -> dict[str, Any]:
    """Return the CPU model, the usable cores, instruction sets, memory in bytes, and GPUs: name, memory, driver."""
    processor = read_processor()
    return {
        "cpu": processor.name or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_flags": [flag for flag in _CPU_FLAGS if flag in processor.flags],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [gpu_text(line) for line in _lines("nvidia-smi", _GPU_QUERY, "--format=csv,noheader")],
        "system": platform.platform(),
    }


def describe(machine: dict[str, Any]) -> str:
    """Return the machine in one line."""
    flags = machine["cpu_flags"]
    without = [name for name, prefix in (("AVX512", "avx512f"), ("AMX", "amx")) if not _any(flags, prefix)]
    parts = [f"{machine['cpu']}, {machine['cores']} cores", " ".join(flags) or "no vector flags known"]
    parts += [f"no {' and no '.join(without)}"] if without else []
    parts += [f"{machine['memory_bytes'] / 2**30:.0f} GiB of memory", *machine["gpus"]]
    return "; ".join(parts)


def _any(flags: list[str], prefix: str) -> bool:
    return any(flag.startswith(prefix) for flag in flags)


def source(root: Path) -> dict[str, Any]:
    """Return the commit of `root` and whether files differ from it, or None outside a git checkout."""
    commit = _lines("git", "-C", str(root), "rev-parse", "HEAD")
    changed = _lines("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit[0] if commit else None, "changed_files": len(changed)}


def _lines(*command: str) -> list[str]:
    """Return the output lines of a program; none if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
