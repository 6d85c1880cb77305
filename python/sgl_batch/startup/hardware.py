"""Reads what a profile depends on of the machine: its processor, cores, instruction set and GPU."""

from __future__ import annotations

import os
from pathlib import Path

from sgl_batch.processor import read_processor

# From the best on: what the kernels for matrix products choose by.
_INSTRUCTION_SETS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
# Either is there where NVIDIA's driver is.
_DRIVERS = ("dev/nvidiactl", "proc/driver/nvidia")


def hardware(root: Path = Path("/")) -> dict[str, object]:
    """Return the machine's parts by name. `root`: where its /proc is."""
    processor = read_processor(root)
    gpus = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    models = [
        line.partition(":")[2].strip() for gpu in gpus for line in _text(gpu).splitlines() if line.startswith("Model")
    ]
    if not models and (root / "dev/nvidiactl").exists():
        models = ["of a name that cannot be read"]
    return {
        "processor": processor.name or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "instruction_set": next(
            (name for name in _INSTRUCTION_SETS if name in processor.flags), "none of AVX2 and later"
        ),
        "gpu": ", ".join(models) or None,
    }


def has_gpu_driver(root: Path = Path("/")) -> bool:
    """Return whether NVIDIA's driver is here. torch knows it too, but its import takes a second."""
    return any((root / place).exists() for place in _DRIVERS)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
