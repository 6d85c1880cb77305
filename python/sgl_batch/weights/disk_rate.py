"""Measures how fast files can be read past the page cache, with as many threads as an engine reads with.

Reads go into huge pages. With small pages the same disk gave a third of the rate, because the kernel then cuts reads
into short requests.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from sgl_batch.memory.huge_buffer import huge_buffer

_READ_BYTES = 2 << 20


def disk_rate(files: list[Path], *, threads: int, most_bytes: int) -> float:
    """Return the bytes per second of reading the files in order, in pieces of 2 MiB, until `most_bytes` are read."""
    pieces = _pieces(files, most_bytes)
    lock, read = threading.Lock(), [0] * threads
    opened = {file: os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files}

    def work(number: int) -> None:
        memory = huge_buffer(_READ_BYTES)
        while True:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                return
            read[number] += os.preadv(opened[piece[0]], [memory], piece[1])

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    begun = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    took = time.perf_counter() - begun
    for descriptor in opened.values():
        os.close(descriptor)
    return sum(read) / took


def _pieces(files: list[Path], most_bytes: int) -> Iterator[tuple[Path, int]]:
    left = most_bytes
    for file in files:
        for offset in range(0, file.stat().st_size - _READ_BYTES, _READ_BYTES):
            if left <= 0:
                return
            left -= _READ_BYTES
            yield file, offset
