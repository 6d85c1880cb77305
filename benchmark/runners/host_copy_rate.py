"""Owns measuring how fast bytes come from host memory: pinned memory to the GPU, or memory to memory without one.

Called by the comparing side as `PYTHON host_copy_rate.py SPEC RESULT`. Not yet run on a GPU.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Bytes per second of `rounds` copies of `num_bytes` each: their median, smallest and largest."""
    import torch

    on_gpu = spec["device"] == "cuda"
    source = torch.ones(spec["num_bytes"], dtype=torch.uint8, pin_memory=on_gpu)
    target = torch.empty_like(source, device=spec["device"], pin_memory=False)
    finish: Callable[[], object] = torch.cuda.synchronize if on_gpu else (lambda: None)
    rates = []
    for _ in range(spec["rounds"] + 1):
        finish()
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        finish()
        rates.append(spec["num_bytes"] / (time.perf_counter() - begun))
    rates = rates[1:]  # the first touches the memory
    return {
        "what": "pinned host memory to the GPU" if on_gpu else "memory to memory, one thread or more: no GPU here",
        "bytes_per_s": statistics.median(rates),
        "low": min(rates),
        "high": max(rates),
    }


def main() -> None:
    spec_path, result_path = map(Path, sys.argv[1:3])
    result_path.write_text(json.dumps(measure(json.loads(spec_path.read_text(encoding="utf-8")))), encoding="utf-8")


if __name__ == "__main__":
    main()
