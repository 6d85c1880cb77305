"""Writes a job's output and error files, whole and in input order, from its segment."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sgl_batch.jobs.batch_service.validation import StoppedError
from sgl_batch.jobs.failpoints import failpoint
from sgl_batch.jobs.job_store.database import connect
from sgl_batch.jobs.job_store.directory import JobsDirectory
from sgl_batch.jobs.job_store.job_rows import JobRow
from sgl_batch.jobs.job_store.result_rows import ResultRow, result_rows
from sgl_batch.jobs.line_reader import RawLine, read_lines
from sgl_batch.jobs.request_line import custom_id_of
from sgl_batch.jobs.result_lines import result_token, unanswered_result_line
from sgl_batch.jobs.scratch import private_opener, storage_errors

_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Unanswered:
    """The error of the lines that have no answer."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSizes:
    """Bytes of the two files. A file without lines is not made."""

    output: int
    errors: int


class Finalizer:
    """Writes the files of one job. After a crash or a full disk it may run again, and writes the same bytes.

    `unanswered`: the error of lines without an answer; None where all lines have one.
    """

    def __init__(
        self, directory: JobsDirectory, job: JobRow, unanswered: Unanswered | None, stop: threading.Event
    ) -> None:
        self._directory = directory
        self._job = job
        self._unanswered = unanswered
        self._stop = stop

    def run(self, max_line_bytes: int) -> OutputSizes:
        """Write, sync and then name both files. Raises StorageError, or StoppedError once `stop` is set."""
        output, errors = self._directory.new_partial(), self._directory.new_partial()
        with storage_errors(f"writing the output of {self._job.id}"):
            try:
                self._write(output, errors, max_line_bytes)
                failpoint("finalizer.files_synced")
                sizes = OutputSizes(output=output.stat().st_size, errors=errors.stat().st_size)
                if sizes.output:
                    self._directory.publish(output, self._job.output_file_id)
                failpoint("finalizer.output_named")
                if sizes.errors:
                    self._directory.publish(errors, self._job.error_file_id)
                failpoint("finalizer.errors_named")
                return sizes
            finally:
                output.unlink(missing_ok=True)
                errors.unlink(missing_ok=True)

    def _write(self, output: Path, errors: Path, max_line_bytes: int) -> None:
        with ExitStack() as opened:
            database = opened.enter_context(closing(connect(self._directory.database)))
            files = [opened.enter_context(_new_file(path)) for path in (output, errors)]
            segment = opened.enter_context(_opened_segment(self._directory.segment(self._job.id)))
            for failed, result_line in self._result_lines(database, segment, max_line_bytes):
                if self._stop.is_set():
                    raise StoppedError
                files[failed].write(result_line)
            for file in files:
                file.flush()
                os.fsync(file.fileno())

    def _result_lines(
        self, database: sqlite3.Connection, segment: BinaryIO, max_line_bytes: int
    ) -> Iterator[tuple[bool, bytes]]:
        rows = result_rows(database, self._job.seq)
        if self._unanswered is None:
            for position, row in enumerate(rows):
                assert row.line_index == position, f"line {position} of {self._job.id} has no result"
                yield row.failed, _read_result_line(segment, row)
            return
        row_or_none = next(rows, None)
        for raw in read_lines(self._directory.file(self._job.input_file_id), max_line_bytes):
            if row_or_none is not None and row_or_none.line_index == raw.index:
                yield row_or_none.failed, _read_result_line(segment, row_or_none)
                row_or_none = next(rows, None)
            else:
                yield True, self._unanswered_line(self._unanswered, raw)

    def _unanswered_line(self, unanswered: Unanswered, raw: RawLine) -> bytes:
        token = result_token(self._job.id, raw.index)
        return unanswered_result_line(token, custom_id_of(raw), unanswered.code, unanswered.message)


def _new_file(path: Path) -> BinaryIO:
    return open(path, "wb", buffering=_BUFFER_BYTES, opener=private_opener)


def _opened_segment(path: Path) -> BinaryIO:
    """Open the segment for reading. A job without a finished line has none: then an empty file."""
    return (path if path.exists() else Path(os.devnull)).open("rb", buffering=_BUFFER_BYTES)


def _read_result_line(segment: BinaryIO, row: ResultRow) -> bytes:
    if segment.tell() != row.offset:
        segment.seek(row.offset)
    result_line = segment.read(row.num_bytes)
    if len(result_line) != row.num_bytes:
        raise OSError(f"the segment ends before the result line of line {row.line_index}")
    return result_line
