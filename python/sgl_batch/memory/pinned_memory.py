"""Owns making host memory one that a GPU reads and writes by itself. Which memory, and how long, is the caller's."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import torch

from sgl_batch.errors import ConfigError

logger = logging.getLogger(__name__)

# Some seconds each: the kernel gives and locks a few GB a second.
_STEP_BYTES = 4 << 30
_GIB = 1 << 30
_PAGE_BYTES = 4096

Register = Callable[[int, int], int]
"""Pins or unpins memory at an address, of a size; 0, or the driver's fault."""


def _register(address: int, size: int) -> int:
    return int(torch.cuda.cudart().cudaHostRegister(address, size, 0))


def _unregister(address: int, size: int) -> int:
    return int(torch.cuda.cudart().cudaHostUnregister(address))


def pin(
    memory: torch.Tensor,
    what: str,
    remedy: str,
    *,
    unit_bytes: int | None = None,
    register: Register = _register,
    unregister: Register = _unregister,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Pin the memory of a tensor, all of it claimed from now on. Raises ConfigError, which names it `what`.

    `unit_bytes`: whole pages, where no copy takes bytes of two units: then large memory is pinned in steps of whole
    units, which are logged. Without it all is pinned at once, since a copy may not cross the border of two steps.
    """
    address, total, begun = memory.data_ptr(), memory.nbytes, now()
    done: list[tuple[int, int]] = []
    for offset, size in _steps(total, unit_bytes):
        fault = register(address + offset, size)
        if fault:
            for earlier, earlier_size in done:
                unregister(address + earlier, earlier_size)
            raise ConfigError(
                f"the GPU's driver has pinned {offset} of {total} bytes of {what} and no more (CUDA error {fault}); "
                f"lift the limit on locked memory (ulimit -l), or {remedy}"
            )
        done.append((offset, size))
        pinned = offset + size
        if total > _STEP_BYTES:
            rate = pinned / max(now() - begun, 1e-9)
            logger.info(
                "%s: %.1f of %.1f GiB pinned, %.1f GiB/s, %.0f s left",
                *(what, pinned / _GIB, total / _GIB, rate / _GIB, (total - pinned) / rate),
            )


def unpin(memory: torch.Tensor, *, unit_bytes: int | None = None, unregister: Register = _unregister) -> None:
    """Undo `pin` with the same `unit_bytes`: no work of the GPU uses the memory any more."""
    for offset, size in _steps(memory.nbytes, unit_bytes):
        unregister(memory.data_ptr() + offset, size)


def _steps(total: int, unit_bytes: int | None) -> Iterator[tuple[int, int]]:
    """Where each step begins, and its size."""
    assert unit_bytes is None or unit_bytes % _PAGE_BYTES == 0, f"two steps would share a page: {unit_bytes} bytes"
    size = total if unit_bytes is None else unit_bytes * max(1, _STEP_BYTES // unit_bytes)
    for offset in range(0, total, size):
        yield offset, min(size, total - offset)
