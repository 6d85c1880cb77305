"""Owns memory that is held until other programs take as much: what they get is then memory that was just in use.

A virtual machine may give its free memory back to its host, and gets it again at a tenth of the rate of other machines.
Programs that take their memory beside this one run as they would where the machine keeps its memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch

from sgl_batch.memory.huge_buffer import huge_buffer
from sgl_batch.memory.page_advice import populate

PIECE_BYTES = 128 << 20
# Freed before others ask for it.
AHEAD_BYTES = 1 << 30
_LOOK_S = 0.002
_MEMINFO = Path("/proc/meminfo")


def free_bytes() -> int:
    """Return the bytes of memory that nothing uses, not even as a cache."""
    line = next(line for line in _MEMINFO.read_text(encoding="ascii").splitlines() if line.startswith("MemFree"))
    return int(line.split()[1]) << 10


class HeldMemory:
    """Holds `num_bytes`, less what all programs have taken since it was entered. It frees memory from a thread.

    `free`: returns the machine's bytes of free memory.
    """

    def __init__(self, num_bytes: int, free: Callable[[], int] = free_bytes) -> None:
        self._pieces, self._read_free = [_piece() for _ in range(num_bytes // PIECE_BYTES)], free
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="held memory", daemon=True)

    @property
    def num_bytes(self) -> int:
        """The bytes that it still holds."""
        return len(self._pieces) * PIECE_BYTES

    def __enter__(self) -> HeldMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()
        self._free(self.num_bytes)

    def _run(self) -> None:
        at_first, freed = self._read_free(), 0
        while self._pieces and not self._left.wait(_LOOK_S):
            taken = at_first + freed - self._read_free()
            freed += self._free(taken + AHEAD_BYTES - freed)

    def _free(self, num_bytes: int) -> int:
        """Free at least so many bytes, if it holds them, and return how many."""
        before = self.num_bytes
        while self._pieces and before - self.num_bytes < num_bytes:
            self._pieces.pop()
        return before - self.num_bytes


def _piece() -> torch.Tensor:
    piece = torch.frombuffer(huge_buffer(PIECE_BYTES), dtype=torch.uint8)
    populate(piece)
    return piece
