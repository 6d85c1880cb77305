"""Writes finished lines to the output and error files, once and in input order."""

from __future__ import annotations

from sgl_batch.file_run.line_file import LineFile
from sgl_batch.file_run.waiting_results import Finished, WaitingResults


class OrderedOutput:
    """Takes finished lines in any order, and writes each when all earlier lines are written.

    Until then a finished line waits on disk, in `waiting`. Only `write_rest` skips lines that were never added because
    the run was stopped.
    """

    def __init__(self, output: LineFile, errors: LineFile, waiting: WaitingResults, *, next_index: int = 0) -> None:
        self.next_index = next_index  # all lines before it are in the files
        self._output = output
        self._errors = errors
        self._waiting = waiting
        self._next: Finished | None = None  # the line at `next_index`

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
        """Finished lines that are not written yet."""
        return self._waiting.num_waiting + (self._next is not None)

    def add(self, finished: Finished) -> None:
        """Take a finished line. Raises StorageError when it has to wait and the disk cannot take it."""
        assert finished.index >= self.next_index, f"line {finished.index} was already written"
        assert finished.index not in self._waiting, f"line {finished.index} was already added"
        # The line that all others wait for goes straight to its file.
        if finished.index == self.next_index:
            assert self._next is None, f"line {finished.index} was already added"
            self._next = finished
        else:
            self._waiting.put(finished)

    def write_ready(self, limit: int) -> bool:
        """Write up to `limit` lines whose earlier lines are written. Return whether more may be ready."""
        batch = [] if self._next is None else [self._next]
        while len(batch) < limit and (finished := self._waiting.get(self.next_index + len(batch))) is not None:
            batch.append(finished)
        self._write(batch)
        # A line leaves `waiting` only when it is written, so that a failing disk loses none.
        for finished in batch:
            if finished is not self._next:
                self._waiting.release(finished.index)
        self._next = None
        self._advance(self.next_index + len(batch))
        return len(batch) == limit

    def write_rest(self, limit: int) -> bool:
        """Write up to `limit` of the lines left, in order, and skip lines that never finished.

        Return whether more are left.
        """
        if not self.write_ready(limit) and self.num_waiting:
            self._advance(self._waiting.first_from(self.next_index))
        return self.num_waiting > 0

    def sync(self) -> None:
        """Wait until all added lines are on the disk. It may be called from another thread."""
        written_out = self._waiting.written_out()
        self._output.sync()
        self._errors.sync()
        self._waiting.sync(written_out)

    def close(self) -> None:
        """Close both files. The waiting files stay where some of their lines are not written."""
        try:
            self._output.close()
            self._errors.close()
        except BaseException:
            self._waiting.close()
            raise
        if self.num_waiting:
            self._waiting.close()
        else:
            self._waiting.remove()

    def _advance(self, index: int) -> None:
        self.next_index = index
        self._waiting.forget_before(index)

    def _write(self, batch: list[Finished]) -> None:
        self._output.append([one.result_line for one in batch if not one.failed])
        self._errors.append([one.result_line for one in batch if one.failed])
