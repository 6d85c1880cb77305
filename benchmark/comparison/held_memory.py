"""Owns memory that is held until other programs take as much: what they get is then memory that was just in use.

A virtual machine may give its free memory back to its host, and gets it again at a tenth of the rate of other machines.
Programs that take their memory beside this one run as they would where the machine keeps its memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sgl_batch.memory.held_memory import HeldMemory, unused_bytes

# Others take it meanwhile as fast as memory in use comes, with all cores, which the thread here shares.
AHEAD_BYTES = 1 << 30


@contextmanager
def held_memory(num_bytes: int, unused: Callable[[], int] = unused_bytes) -> Iterator[HeldMemory]:
    """Hold `num_bytes` inside, less what all programs have taken by then. A thread frees it.

    `unused`: returns the machine's bytes of memory that nothing uses.
    """
    held, left = HeldMemory(unused, ahead_bytes=AHEAD_BYTES), threading.Event()
    held.take(num_bytes)
    thread = threading.Thread(target=held.free_for_others, args=(left.is_set,), name="held memory", daemon=True)
    thread.start()
    try:
        yield held
    finally:
        left.set()
        thread.join()
        held.free(held.num_bytes)
