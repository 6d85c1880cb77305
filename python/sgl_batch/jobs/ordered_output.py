"""Writes finished lines to the output and error files, once and in input order; does not decide content."""

from __future__ import annotations

from sgl_batch.jobs.line_file import LineFile
from sgl_batch.jobs.spool import Finished, Spool

DEFAULT_MEMORY_BYTES = 8 << 20
_OBJECT_BYTES = 300  # of Python's own objects around one waiting record


class OrderedOutput:
    """Takes finished lines in any order and writes those whose earlier lines are all written.

    At most `memory_bytes` of records wait in memory; beyond that they wait in the spool. Lines that are never
    added (a run was stopped) are skipped by `write_rest` alone.
    """

    def __init__(
        self,
        output: LineFile,
        errors: LineFile,
        spool: Spool,
        *,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        next_index: int = 0,
    ) -> None:
        self.next_index = next_index  # the lines before it are in the files
        self._output = output
        self._errors = errors
        self._spool = spool
        self._memory_bytes = memory_bytes
        self._waiting: dict[int, Finished] = {}
        self._waiting_bytes = 0

    @property
    def num_ok(self) -> int:
        """Lines written to the output file."""
        return self._output.num_lines

    @property
    def num_failed(self) -> int:
        """Lines written to the error file."""
        return self._errors.num_lines

    @property
    def num_waiting(self) -> int:
        """Finished lines that wait for an earlier one."""
        return len(self._waiting) + self._spool.num_records

    def add(self, finished: Finished) -> None:
        """Take a finished line. Raises StorageError when the spool cannot take it."""
        assert finished.index >= self.next_index, f"line {finished.index} was already written"
        assert finished.index not in self._waiting, f"line {finished.index} was already added"
        size = _size(finished)
        # The line that all others wait for never goes to the disk first.
        if finished.index != self.next_index and self._waiting_bytes + size > self._memory_bytes:
            self._spool.put(finished)
            return
        self._waiting[finished.index] = finished
        self._waiting_bytes += size

    def write_ready(self, limit: int) -> bool:
        """Write up to `limit` lines that wait for no other; return whether more may be ready."""
        batch: list[Finished] = []
        while len(batch) < limit and (finished := self._take_next()) is not None:
            batch.append(finished)
            self.next_index += 1
        self._write(batch)
        return len(batch) == limit

    def write_rest(self, limit: int) -> bool:
        """Write up to `limit` of what is left, in order, over the gaps of lines that never finished.

        Returns whether more is left.
        """
        if not self.write_ready(limit) and self.num_waiting:
            in_spool = self._spool.take_first()
            if in_spool is not None:
                self._waiting[in_spool.index] = in_spool
                self._waiting_bytes += _size(in_spool)
            self.next_index = min(self._waiting)
        return self.num_waiting > 0

    def sync(self) -> None:
        """Wait until both files are on the disk."""
        self._output.sync()
        self._errors.sync()

    def close(self) -> None:
        """Close both files and remove the spool."""
        try:
            self._output.close()
            self._errors.close()
        finally:
            self._spool.close()

    def _take_next(self) -> Finished | None:
        finished = self._waiting.pop(self.next_index, None)
        if finished is None:
            return self._spool.take(self.next_index)
        self._waiting_bytes -= _size(finished)
        return finished

    def _write(self, batch: list[Finished]) -> None:
        self._output.append([one.record for one in batch if not one.failed])
        self._errors.append([one.record for one in batch if one.failed])


def _size(finished: Finished) -> int:
    return len(finished.record) + _OBJECT_BYTES
