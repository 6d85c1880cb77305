"""Owns pinning host memory, which a GPU then reads and writes by itself. The caller says which memory, and when."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import torch

from sgl_batch.errors import ConfigError

logger = logging.getLogger(__name__)

# Each step takes seconds: the kernel allocates and locks a few GB a second.
_STEP_BYTES = 4 << 30
_GIB = 1 << 30
_PAGE_BYTES = 4096

Register = Callable[[int, int], int]
"""Pins or unpins memory (address, bytes); returns 0, or the driver's error."""


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
    """Pin the memory of a tensor, which claims all of it.

    Args:
        memory: contiguous host memory. It stays allocated until `unpin`.
        what: names the memory in logs and errors.
        remedy: what the user can do in place of lifting the limit on locked memory.
        unit_bytes: a multiple of 4096 such that no copy spans two units. Large memory is then pinned in steps of whole
            units, which are logged. None pins all at once, because a copy may not span two steps.
        register: pins; tests replace it.
        unregister: unpins; tests replace it.
        now: the clock, in seconds.

    Raises:
        ConfigError: the driver refuses. Nothing stays pinned.
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
    """Undo a `pin` with the same `unit_bytes`. The caller has waited for all GPU work that uses the memory."""
    for offset, size in _steps(memory.nbytes, unit_bytes):
        unregister(memory.data_ptr() + offset, size)


def _steps(total: int, unit_bytes: int | None) -> Iterator[tuple[int, int]]:
    """Yield the offset and size of each step."""
    assert unit_bytes is None or unit_bytes % _PAGE_BYTES == 0, f"two steps would share a page: {unit_bytes} bytes"
    size = total if unit_bytes is None else unit_bytes * max(1, _STEP_BYTES // unit_bytes)
    for offset in range(0, total, size):
        yield offset, min(size, total - offset)
