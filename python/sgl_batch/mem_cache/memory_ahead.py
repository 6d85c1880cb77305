"""Owns giving a pool's first pages their memory before they are written. The caller says when there is time for it.

A page that is written for the first time waits until the kernel has given and cleared its memory, on a virtual machine
at a tenth of the rate of memory in use. The allocator gives out pages by number, and freed ones before new ones
(mem_cache/page_allocator), so those with the lowest numbers are written first, in every layer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.memory.page_advice import HUGE_PAGE_BYTES, populate

logger = logging.getLogger(__name__)

# Of the free memory: an engine that gets few requests would not have taken it.
_SHARE_OF_FREE = 16

Populate = Callable[[torch.Tensor], bool]
"""Gives a part of a tensor's memory; returns whether the kernel has."""


def most_bytes_ahead(free: int, *, num_ranks: int, page_bytes: int, most_pages: int, weight_bytes: int) -> int:
    """Return how many bytes of KV a rank may take ahead.

    Args:
        free: bytes of free memory, which the ranks share.
        num_ranks: ranks on this machine.
        page_bytes: bytes of a page in all layers.
        most_pages: the most pages that the largest running batch can need.
        weight_bytes: of the rank's weights. What may never be used is kept in proportion to them: an engine of a small
            model would spend its first seconds on memory for pages that its few requests never reach.
    """
    return min(free // _SHARE_OF_FREE // num_ranks, page_bytes * most_pages, weight_bytes)


class MemoryAhead:
    """Takes memory for the first pages of a pool, a piece at a time, at most `most_bytes` and never a byte twice.

    A piece is a huge page, so that it takes no more memory than it has where the kernel gives such pages. What a layer
    has before its first whole huge page is left to the first write.

    Args:
        parts: the pages' tensors in memory, each [num_pages, ...], of all layers.
        most_bytes: of all tensors together.
        logs: whether to log how much has been taken, in the end.
        give: gives a piece; tests replace it.
    """

    def __init__(
        self, parts: Sequence[torch.Tensor], most_bytes: int, *, logs: bool = False, give: Populate = populate
    ) -> None:
        self._pieces: Iterator[torch.Tensor] | None = _pieces(parts, most_bytes)
        self._logs, self._give, self.taken_bytes = logs, give, 0
        self._lock = threading.Lock()

    def step(self) -> bool:
        """Take the next piece. Returns False once there is none: all is taken, or the kernel cannot give it."""
        with self._lock:
            piece = None if self._pieces is None else next(self._pieces, None)
        is_given = piece is not None and self._give(piece)
        with self._lock:
            if piece is not None and is_given:
                self.taken_bytes += piece.nbytes
            elif self._pieces is not None:
                self._pieces = None
                if self._logs:
                    logger.info("%s for KV taken from the kernel ahead", format_bytes(self.taken_bytes))
        return is_given

    def take_for(self, seconds: float, num_threads: int) -> None:
        """Take pieces until all are taken, or for so long. Ends at most one piece of each thread later."""
        end = time.perf_counter() + seconds

        def take() -> None:
            while time.perf_counter() < end and self.step():
                pass

        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(lambda _: take(), range(num_threads)))  # raises what a thread has raised


def _pieces(parts: Sequence[torch.Tensor], most_bytes: int) -> Iterator[torch.Tensor]:
    """Yield the pieces by the order in which pages come, in turn from each tensor."""
    rows = [_whole_pieces(part) for part in parts]
    left = most_bytes // HUGE_PAGE_BYTES
    for number in range(max((len(row) for row in rows), default=0)):
        for row in rows:
            if number < len(row):
                if left <= 0:
                    return
                left -= 1
                yield row[number]


def _whole_pieces(part: torch.Tensor) -> torch.Tensor:
    """Return a tensor's whole huge pages [N, HUGE_PAGE_BYTES], as bytes."""
    memory = part.view(-1).view(torch.uint8)
    first = -part.data_ptr() % HUGE_PAGE_BYTES
    num_pieces = max(0, memory.nbytes - first) // HUGE_PAGE_BYTES
    return memory[first : first + num_pieces * HUGE_PAGE_BYTES].view(num_pieces, HUGE_PAGE_BYTES)
