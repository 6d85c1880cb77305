"""Owns how much memory is taken for a start while its program imports: what the weights and a first batch will need.

Imports need one core of the machine, and taking memory needs one. On a GPU's machine weights are not in this memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from sgl_batch.memory.free_memory import free_bytes
from sgl_batch.startup.hardware import has_gpu_driver

logger = logging.getLogger(__name__)

# Less is there before a process that takes it would be.
_FEWEST_BYTES = 256 << 20
# For KV, the inputs of passes, and blocks of files. Less for a model that has less itself.
_BESIDE_WEIGHTS_BYTES = 1 << 30


def bytes_ahead(files: Sequence[Path], *, on_cpu: bool = False, free: Callable[[], int] = free_bytes) -> int:
    """Return how many bytes of memory to take before the weights in `files` are loaded; 0 where it does not pay.

    At most half of the free memory: others may take theirs meanwhile.

    Args:
        files: As `weights_ahead.resident_files` returns them.
        on_cpu: Whether the engine runs on the CPU in any case. Else it does where there is no GPU.
        free: Returns the bytes of free memory.
    """
    may_pay = len(os.sched_getaffinity(0)) > 1 and (on_cpu or not has_gpu_driver())
    try:
        weights = sum(file.stat().st_size for file in files) if may_pay else 0
        return 0 if weights < _FEWEST_BYTES else min(weights + min(weights, _BESIDE_WEIGHTS_BYTES), free() // 2)
    except (OSError, LookupError) as error:
        logger.debug("no memory is taken ahead: %s", error)
        return 0
