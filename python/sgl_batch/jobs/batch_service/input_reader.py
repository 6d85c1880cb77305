"""Reads the lines of a running job ahead of the engine, off the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from sgl_batch.jobs.batch_service.line_offsets import LineOffsets
from sgl_batch.jobs.batch_service.line_states import LineStates
from sgl_batch.jobs.line_reader import RawLine, read_lines
from sgl_batch.jobs.request_line import LineRules, RefusedLine, RequestLine, parse_request_line
from sgl_batch.jobs.scratch import StorageError

READ_AHEAD_LINES = 512  # of all jobs together, as long as they are few
READ_AHEAD_BYTES = 4 << 20
FEWEST_LINES = 8  # of each job

Line = RequestLine | RefusedLine


class InputReader:
    """Hands out each line to do once, in input order. `read` reads lines again that were taken before."""

    def __init__(self, path: Path, offsets: LineOffsets, rules: LineRules, lines: LineStates) -> None:
        self._path = path
        self._offsets = offsets
        self._rules = rules
        self._lines = lines
        self._ahead: deque[Line] = deque()
        self._next = lines.first_to_do()
        self._reader: Iterator[RawLine] | None = None

    @property
    def num_ready(self) -> int:
        """How many lines can be taken without waiting."""
        return len(self._ahead)

    def wants_filling(self, num_jobs: int) -> bool:
        """Return whether to read more ahead, where `num_jobs` jobs share the read-ahead."""
        return self._next is not None and len(self._ahead) <= max(READ_AHEAD_LINES // num_jobs // 2, FEWEST_LINES)

    def take(self) -> Line:
        """Take the next line."""
        line = self._ahead.popleft()
        self._lines.take(line.index)
        return line

    async def fill(self, num_jobs: int) -> None:
        """Read some lines ahead, one call at a time. After a StorageError nothing is lost: call it again."""
        self._ahead.extend(await asyncio.to_thread(self._read_some, num_jobs))

    async def read(self, indexes: Sequence[int]) -> list[Line]:
        """Return these lines, in ascending order. Raises StorageError."""
        return await asyncio.to_thread(lambda: [self._parse(raw) for raw in self._raw(sorted(indexes))])

    def _read_some(self, num_jobs: int) -> list[Line]:
        max_lines, max_bytes = max(READ_AHEAD_LINES // num_jobs, 2 * FEWEST_LINES), READ_AHEAD_BYTES // num_jobs
        if self._next is None:
            return []
        if self._reader is None:
            self._reader = read_lines(self._path, self._rules.max_line_bytes, self._offsets.before(self._next))
        found: list[Line] = []
        num_bytes, following = 0, self._next
        try:
            while following < self._lines.total and len(found) < max_lines and num_bytes <= max_bytes:
                raw = self._following(self._reader)
                if raw.index < following:
                    continue
                following = raw.index + 1
                if self._lines.is_to_do(raw.index):
                    found.append(self._parse(raw))
                    num_bytes += raw.num_bytes
        except StorageError:
            self._reader = None
            raise
        self._next = following if following < self._lines.total else None
        if self._next is None:
            self._reader = None
        return found

    def _raw(self, indexes: Sequence[int]) -> Iterator[RawLine]:
        reader, position = None, 0
        for index in indexes:
            start = self._offsets.before(index)
            if reader is None or start.index > position:
                reader, position = read_lines(self._path, self._rules.max_line_bytes, start), start.index
            while position <= index:
                raw = self._following(reader)
                position = raw.index + 1
            yield raw

    def _following(self, reader: Iterator[RawLine]) -> RawLine:
        raw = next(reader, None)
        if raw is None:
            raise StorageError(f"the input {self._path} ended before its last line: it was changed or cut")
        return raw

    def _parse(self, raw: RawLine) -> Line:
        return parse_request_line(raw, self._rules, _seen_in_validation)


def _seen_in_validation(custom_id: str, number: int) -> None:
    """Accept every custom_id: validation has found that none comes twice."""
