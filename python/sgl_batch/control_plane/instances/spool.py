"""Owns the answers of an instance on its node's disk, from when they are given until they are acknowledged.

It knows no engine and no Ray. `spool_files` knows the form of the files.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sgl_batch.control_plane.instances import spool_files
from sgl_batch.control_plane.instances.messages import Answered
from sgl_batch.control_plane.instances.spool_files import SEGMENT_BYTES, Place, SegmentWriter
from sgl_batch.errors import ConfigError
from sgl_batch.jobs.batch_service.storage_guard import FIRST_RETRY_S, LONGEST_RETRY_S
from sgl_batch.jobs.scratch import StorageError

logger = logging.getLogger(__name__)

KEPT_S = 7 * 86400.0  # answers that nobody acknowledges
_GROUP_EVERY_S = 0.02
_GROUP_BYTES = 16 << 20
_MEMORY_BYTES = 64 << 20


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    key: str
    status_code: int
    request_id: str
    body: bytes

    def numbered(self, number: int) -> Answered:
        return Answered(number, self.key, self.status_code, self.request_id, self.body)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Stored)


@dataclass(slots=True)
class _Kept:
    """An answer on the disk. `answered`: None where it is not in memory. `since`: Unix time."""

    key: str
    place: Place
    since: float
    answered: Answered | None


class Spool:
    """The answers of one incarnation, and those that earlier ones have left in the same directory.

    All methods are called on one event loop; files are written and read in a thread. Answers of earlier incarnations
    get the first numbers. Their files are only read, once: an old process may still append to its own.

    Attributes:
        message: Why the disk does not take answers at the moment, else None. Writing is tried again.
        on_news: Called when answers have become visible or `message` has changed.
        on_lost: Called with the key of an answer that the disk does not give back, and why.

    Args:
        directory: Made if it is missing.
        incarnation: Higher than all before.
        clock: Unix time.
        segment_bytes: A segment that has so many bytes is followed by another.
        memory_bytes: Of unacknowledged answers, so many are in memory. Others are read from the disk again.

    Raises:
        ConfigError: The directory cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        incarnation: int,
        *,
        clock: Callable[[], float] = time.time,
        segment_bytes: int = SEGMENT_BYTES,
        memory_bytes: int = _MEMORY_BYTES,
        first_retry_s: float = FIRST_RETRY_S,
    ) -> None:
        self.message: str | None = None
        self._directory, self._incarnation = directory, incarnation
        self.on_news: Callable[[], None] = lambda: None
        self.on_lost: Callable[[str, str], None] = lambda key, why: None
        self._clock, self._memory_bytes, self._first_retry_s = clock, memory_bytes, first_retry_s
        self._next_number = 1
        self._kept: dict[int, _Kept] = {}
        self._numbers: dict[str, tuple[int, ...]] = {}
        self._left: dict[Path, int] = {}
        self._current: Path | None = None
        self._bytes_in_memory = 0
        self._pending: list[_Stored] = []
        self._writing_keys: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._writer = SegmentWriter(directory, incarnation, segment_bytes)
        self._thread = ThreadPoolExecutor(1, "spool")
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            for segment in spool_files.segments(directory):
                self._open(segment)
        except OSError as error:
            raise ConfigError(f"the directory of answers {directory} cannot be used: {error}") from error

    def _open(self, segment: Path) -> None:
        """Take in the answers of an earlier process. It may remove the segment meanwhile: all are acknowledged then."""
        try:
            since = segment.stat().st_mtime
            if since >= self._clock() - KEPT_S:
                acknowledged = spool_files.read_acknowledged(segment)
                for place, record in spool_files.read_segment(segment):
                    if place.position not in acknowledged:
                        self._keep(_DECODER.decode(record), place, since)
        except FileNotFoundError:
            logger.info("%s was removed by an earlier process", segment)
        if segment not in self._left:
            spool_files.remove_segment(segment)

    def __len__(self) -> int:
        return len(self._kept)

    def holds(self, key: str) -> bool:
        """Whether an answer of this key is here, visible or not."""
        return key in self._numbers or key in self._writing_keys

    def add(self, key: str, status_code: int, request_id: str, body: bytes) -> None:
        """Give an answer. It becomes visible when the disk has it, however long that takes."""
        self._pending.append(_Stored(key, status_code, request_id, body))
        self._writing_keys.add(key)
        if self._task is None:
            self._task = asyncio.create_task(self._write_pending())

    def again(self, key: str) -> None:
        """Report the answer of this key once more, under a new number: another line has the same key."""
        for number in self._numbers.pop(key, ()):
            kept = self._kept.pop(number)
            if kept.answered is not None:
                kept.answered = msgspec.structs.replace(kept.answered, number=self._next_number)
            self._index(kept)
        self.on_news()

    def has_after(self, number: int) -> bool:
        """Whether there is an answer after this number."""
        return bool(self._kept) and next(reversed(self._kept)) > number

    async def unacknowledged(self, after: int, max_bytes: int) -> tuple[Answered, ...]:
        """Return answers after the number `after`, in order: up to `max_bytes`, but at least one if there is any."""
        self._drop_old()
        if not self.has_after(after):
            return ()
        found: list[Answered] = []
        for number in range(max(after + 1, next(iter(self._kept))), self._next_number):
            kept = self._kept.get(number)
            if kept is None:
                continue
            answered = kept.answered or await self._read(number, kept)
            if answered is None:
                continue
            max_bytes -= len(answered.body) + len(answered.key) + len(answered.request_id)
            if found and max_bytes < 0:
                break
            found.append(answered)
        return tuple(found)

    def acknowledge(self, keys: Iterable[str], up_to: int) -> None:
        """Forget the answers of these keys that have at most the number `up_to`. Others are of later lines."""
        numbers = [number for key in dict.fromkeys(keys) for number in self._numbers.get(key, ()) if number <= up_to]
        if numbers:
            self._forget(numbers)

    async def close(self, within_s: float) -> None:
        """Wait until the disk has all answers, at most about so long; others are lost. Idempotent."""
        if (task := self._task) is not None:
            await asyncio.wait({task}, timeout=within_s)
            task.cancel()
        closing = asyncio.get_running_loop().run_in_executor(self._thread, self._writer.close)
        await asyncio.wait({closing}, timeout=within_s)

    # What is visible.

    def _keep(self, stored: _Stored, place: Place, since: float) -> None:
        self._left[place.segment] = self._left.get(place.segment, 0) + 1
        fits = self._bytes_in_memory + len(stored.body) <= self._memory_bytes
        if fits:
            self._bytes_in_memory += len(stored.body)
        self._index(_Kept(stored.key, place, since, stored.numbered(self._next_number) if fits else None))

    def _index(self, kept: _Kept) -> None:
        number = self._next_number
        self._next_number += 1
        self._kept[number] = kept
        self._numbers[kept.key] = (*self._numbers.get(kept.key, ()), number)

    def _drop_old(self) -> None:
        oldest = self._clock() - KEPT_S
        numbers: list[int] = []
        for number, kept in self._kept.items():
            if kept.since >= oldest:
                break
            numbers.append(number)
        if numbers:
            logger.warning("%d answers that nobody has acknowledged for a week are dropped", len(numbers))
            self._forget(numbers)

    def _forget(self, numbers: Iterable[int]) -> None:
        positions: dict[Path, list[int]] = {}
        for number in numbers:
            kept = self._kept.pop(number)
            others = tuple(one for one in self._numbers.pop(kept.key) if one != number)
            if others:
                self._numbers[kept.key] = others
            if kept.answered is not None:
                self._bytes_in_memory -= len(kept.answered.body)
            positions.setdefault(kept.place.segment, []).append(kept.place.position)
        for segment, found in positions.items():
            self._left[segment] -= len(found)
            if not self._remove_if_done(segment):
                self._in_thread(spool_files.acknowledge, segment, self._incarnation, found)

    def _remove_if_done(self, segment: Path) -> bool:
        if segment == self._current or self._left[segment]:
            return False
        del self._left[segment]
        self._in_thread(spool_files.remove_segment, segment)
        return True

    def _in_thread(self, work: Callable[..., None], *args: object) -> None:
        def try_it() -> None:
            try:
                work(*args)
            except OSError as error:  # the answers come back with the next incarnation, and are acknowledged again
                logger.warning("an acknowledgement is not on the disk: %s", error)

        self._thread.submit(try_it)

    async def _read(self, number: int, kept: _Kept) -> Answered | None:
        loop = asyncio.get_running_loop()
        record = None
        try:
            record = await loop.run_in_executor(self._thread, spool_files.read_record, kept.place)
        except FileNotFoundError:  # an old process has removed it: it was acknowledged
            lost = None
        except StorageError as error:
            logger.error("an answer is lost: %s", error)
            lost = str(error)
        if record is None:
            if number in self._kept:
                self._forget([number])
                if lost is not None:
                    self.on_lost(kept.key, lost)
            return None
        return _DECODER.decode(record).numbered(number)

    # What the disk does not have yet.

    async def _write_pending(self) -> None:
        while self._pending:
            group, size = 0, 0
            while group < len(self._pending) and size < _GROUP_BYTES:
                size += len(self._pending[group].body)
                group += 1
            stored = self._pending[:group]
            places = await self._persist(stored)
            del self._pending[:group]
            self._publish(stored, places)
            await asyncio.sleep(_GROUP_EVERY_S)
        self._task = None

    async def _persist(self, stored: list[_Stored]) -> list[Place]:
        """Write a group, ever slower, until the disk takes it."""
        retry_s = self._first_retry_s
        while True:
            try:
                places = await asyncio.get_running_loop().run_in_executor(self._thread, self._write, stored)
            except StorageError as error:
                self._say(f"{error}; answers are held, and writing is tried again")
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, LONGEST_RETRY_S)
            else:
                self._say(None)
                return places

    def _write(self, stored: list[_Stored]) -> list[Place]:
        return self._writer.write([_ENCODER.encode(one) for one in stored])

    def _publish(self, stored: list[_Stored], places: list[Place]) -> None:
        since, before = self._clock(), self._current
        self._current = places[0].segment
        for one, place in zip(stored, places, strict=True):
            self._keep(one, place, since)
        if before is not None and before != self._current:
            self._remove_if_done(before)
        self._writing_keys = {one.key for one in self._pending}
        self.on_news()

    def _say(self, message: str | None) -> None:
        if message != self.message:
            (logger.error if message else logger.warning)("%s", message or "the disk takes answers again")
            self.message = message
            self.on_news()
