"""Owns the files of a spool: segments of answers, and beside each the acknowledgements of its answers.

A segment `answers-INCARNATION-NUMBER` begins with `_MAGIC`; then each record is its length, its CRC-32 and its bytes.
One process appends to a segment, and no other one ever changes it. `SEGMENT.acknowledged-INCARNATION` has 8 bytes for
each acknowledged record: its position in the segment and the CRC-32 of that. Every incarnation has a file of its own.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sgl_batch.jobs.job_store.directory import sync_directory
from sgl_batch.jobs.scratch import PRIVATE_MODE, StorageError, storage_errors

logger = logging.getLogger(__name__)

_MAGIC = b"sgl_batch spool 1\n"
_HEADER = struct.Struct("<II")
_ACKNOWLEDGED = struct.Struct("<II")
_PREFIX, _ACKNOWLEDGED_IN = "answers-", ".acknowledged-"
SEGMENT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record lies: `position` counts the records of its segment from 0; offset and length are of its bytes."""

    segment: Path
    position: int
    offset: int
    length: int


class SegmentWriter:
    """Appends records to segments of one incarnation. Only one thread uses it."""

    def __init__(self, directory: Path, incarnation: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._directory, self._incarnation, self._segment_bytes = directory, incarnation, segment_bytes
        self._number = 0
        self._path: Path | None = None
        self._file = -1
        self._num_bytes = self._num_records = 0

    def write(self, records: Sequence[bytes]) -> list[Place]:
        """Append records and sync. Raises StorageError: then none is written, and the next call replaces what is."""
        with storage_errors(f"writing answers to {self._directory}"):
            if self._path is None or self._num_bytes >= self._segment_bytes:
                self._begin()
            assert self._path is not None, "a segment has begun"
            parts: list[bytes] = []
            places: list[Place] = []
            offset = self._num_bytes
            for position, record in enumerate(records, self._num_records):
                parts += (_HEADER.pack(len(record), zlib.crc32(record)), record)
                places.append(Place(self._path, position, offset + _HEADER.size, len(record)))
                offset += _HEADER.size + len(record)
            _write_all(self._file, b"".join(parts), self._num_bytes)
            os.fdatasync(self._file)
        self._num_bytes = offset
        self._num_records += len(records)
        return places

    def _begin(self) -> None:
        self.close()
        while True:  # an earlier process may have had this incarnation: its segments are not touched
            self._number += 1
            path = self._directory / f"{_PREFIX}{self._incarnation:08d}-{self._number:06d}"
            with suppress(FileExistsError):
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_MODE)
                break
        try:
            _write_all(self._file, _MAGIC, 0)
            sync_directory(self._directory)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        self._path, self._num_bytes, self._num_records = path, len(_MAGIC), 0

    def close(self) -> None:
        """Close the segment, if one is open. The next record begins another one."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._path = -1, None


def _write_all(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def segments(directory: Path) -> list[Path]:
    """Return the segments in a directory, the oldest first. Acknowledgements without their segment are removed."""
    found = {path.name for path in directory.iterdir() if path.name.startswith(_PREFIX)}
    for name in found:
        segment, is_acknowledgement, _ = name.partition(_ACKNOWLEDGED_IN)
        if is_acknowledgement and segment not in found:
            (directory / name).unlink(missing_ok=True)
    return [directory / name for name in sorted(found) if _ACKNOWLEDGED_IN not in name]


def read_segment(path: Path) -> Iterator[tuple[Place, bytes]]:
    """Yield the whole records of a segment. What follows a torn record is not read. Raises OSError."""
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            logger.warning("%s has no answers that this version can read", path)
            return
        offset, position = len(_MAGIC), 0
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            length, crc = _HEADER.unpack(header)
            record = file.read(length)
            if len(record) != length or zlib.crc32(record) != crc:
                logger.warning("%s: the record at byte %d is torn; it and what follows is left out", path, offset)
                return
            yield Place(path, position, offset + _HEADER.size, length), record
            offset += _HEADER.size + length
            position += 1


def read_record(place: Place) -> bytes:
    """Return the bytes of one record. Raises StorageError; FileNotFoundError where its segment was removed."""
    try:
        with place.segment.open("rb") as file:
            file.seek(place.offset - _HEADER.size)
            length, crc = _HEADER.unpack(file.read(_HEADER.size))
            record = file.read(place.length)
    except FileNotFoundError:
        raise
    except (OSError, struct.error) as error:
        raise StorageError(f"reading {place.segment} failed: {error}") from error
    if length != place.length or zlib.crc32(record) != crc:
        raise StorageError(f"{place.segment} has changed at byte {place.offset}: its checksum differs")
    return record


def acknowledge(segment: Path, incarnation: int, positions: Sequence[int]) -> None:
    """Note that records are acknowledged, for the next process. It is not synced. Raises OSError."""
    path = segment.with_name(f"{segment.name}{_ACKNOWLEDGED_IN}{incarnation:08d}")
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_MODE)
    try:
        os.write(file, b"".join(_ACKNOWLEDGED.pack(one, zlib.crc32(one.to_bytes(4, "little"))) for one in positions))
    finally:
        os.close(file)


def read_acknowledged(segment: Path) -> set[int]:
    """Return the positions of the acknowledged records of a segment. Raises OSError."""
    positions: set[int] = set()
    for path in segment.parent.glob(f"{segment.name}{_ACKNOWLEDGED_IN}*"):
        data = path.read_bytes()
        whole = data[: len(data) // _ACKNOWLEDGED.size * _ACKNOWLEDGED.size]
        positions.update(
            one for one, crc in _ACKNOWLEDGED.iter_unpack(whole) if zlib.crc32(one.to_bytes(4, "little")) == crc
        )
    return positions


def remove_segment(segment: Path) -> None:
    """Remove a segment and its acknowledgements, in this order: an answer must not come back. Raises OSError."""
    segment.unlink(missing_ok=True)
    for path in segment.parent.glob(f"{segment.name}{_ACKNOWLEDGED_IN}*"):
        path.unlink(missing_ok=True)
