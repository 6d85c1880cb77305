"""Owns memory that is taken before other processes need it, and freed as they take as much.

A virtual machine gives its host the memory that it has not used for seconds, and has not got at all what it never used.
The host gives it at a tenth of the rate of memory in use, so that an engine waits longer for its weights' memory than
for their files. This module is also a program, which takes that memory while the engine's own program imports
(`memory_holder`).

What is held counts as free: the kernel takes it back wherever memory is short (MADV_FREE).
"""

from __future__ import annotations

import mmap
import os
import select
import sys
import time
from collections.abc import Callable

from sgl_batch.memory.page_advice import POPULATE_WRITE

PIECE_BYTES = 64 << 20
# Freed before others ask for it: more than they take between two looks, and not so much that the host takes it first.
AHEAD_BYTES = 128 << 20
_LOOK_S = 0.005

Until = Callable[[], bool]
"""Whether to end; asked before each piece and each look."""


def unused_bytes() -> int:
    """Return the bytes of the machine's memory that nothing uses, not even as a cache."""
    return os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE


class HeldMemory:
    """Memory that is held for other processes.

    `unused` returns the bytes of memory that nothing uses. `ahead_bytes`: freed before others ask for them.
    """

    def __init__(self, unused: Callable[[], int] = unused_bytes, *, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._pieces: list[mmap.mmap] = []
        self._unused, self._ahead_bytes = unused, ahead_bytes

    @property
    def num_bytes(self) -> int:
        """The bytes that it holds."""
        return len(self._pieces) * PIECE_BYTES

    def take(self, num_bytes: int, until: Until = lambda: False) -> None:
        """Hold whole pieces of at most `num_bytes` in all. Raises OSError where the kernel cannot give them."""
        while self.num_bytes + PIECE_BYTES <= num_bytes and not until():
            self._pieces.append(_piece())

    def free_for_others(self, until: Until) -> None:
        """Free as much as all processes together take from now on, and some ahead, until nothing is left."""
        at_first, freed = self._unused(), 0
        while self._pieces and not until():
            taken = at_first + freed - self._unused()
            freed += self.free(taken + self._ahead_bytes - freed)
            time.sleep(_LOOK_S)

    def free(self, num_bytes: int) -> int:
        """Free at least `num_bytes`, or all that it holds, and return how many."""
        before = self.num_bytes
        while self._pieces and before - self.num_bytes < num_bytes:
            self._pieces.pop().close()
        return before - self.num_bytes


def _piece() -> mmap.mmap:
    piece = mmap.mmap(-1, PIECE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    piece.madvise(mmap.MADV_HUGEPAGE)
    piece.madvise(POPULATE_WRITE)
    piece.madvise(mmap.MADV_FREE)
    return piece


def main() -> None:
    """Hold as many bytes as the command line says until standard input ends, and free them for others then.

    It ends when nothing is left, and with its parent.
    """
    held, parent = HeldMemory(), os.getppid()
    held.take(int(sys.argv[1]), until=lambda: bool(select.select([sys.stdin], [], [], 0)[0]))
    sys.stdin.read()
    held.free_for_others(until=lambda: os.getppid() != parent)


if __name__ == "__main__":
    main()
