"""Reads files, and the outputs of running jobs, in chunks off the event loop."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from typing import BinaryIO

from sgl_batch.jobs.scratch import storage_errors

CHUNK_BYTES = 256 << 10


async def whole_file(file: BinaryIO, num_bytes: int) -> AsyncIterator[bytes]:
    """Yield the first `num_bytes` of an open file, and close it at the end. The file may be deleted meanwhile."""
    with file:
        left = num_bytes
        while left:
            chunk = await asyncio.to_thread(_read, file, min(left, CHUNK_BYTES))
            left -= len(chunk)
            yield chunk


async def segment_extents(segment: BinaryIO | None, extents: array[int]) -> AsyncIterator[bytes]:
    """Yield the result lines at (offset, length) pairs of an open segment, in that order, and close it at the end.

    A job without a committed line has no segment and no extents.
    """
    if segment is None:
        assert not extents, "result lines without a segment"
        return
    with segment:
        position = 0
        while position < len(extents):
            chunk, position = await asyncio.to_thread(_read_extents, segment, extents, position)
            yield chunk


def _read(file: BinaryIO, num_bytes: int) -> bytes:
    with storage_errors("reading a file"):
        data = file.read(num_bytes)
        if not data:
            raise OSError("it ended before its last byte")
        return data


def _read_extents(segment: BinaryIO, extents: array[int], position: int) -> tuple[bytes, int]:
    parts: list[bytes] = []
    num_bytes = 0
    with storage_errors("reading the output of a running job"):
        while position < len(extents) and num_bytes < CHUNK_BYTES:
            offset, length = extents[position], extents[position + 1]
            if segment.tell() != offset:
                segment.seek(offset)
            parts.append(segment.read(length))
            num_bytes += length
            position += 2
    return b"".join(parts), position
