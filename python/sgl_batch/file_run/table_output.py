"""Owns a run's output that is to be a table: the JSONL files it grows in, which `--resume` goes on with, and its end.

A Parquet file cannot be read before it is whole, and nothing can be appended to it. So result lines go to JSONL files
beside it, and the table is made from them when every request line has one. Either of the two, where it is there and
whole, holds all that is done.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from sgl_batch.jobs.scratch import storage_errors
from sgl_batch.jobs.tables.results import merged, read_result_lines, write_results


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOutput:
    """A table, and the files beside it while it is not whole."""

    table: Path

    @property
    def output(self) -> Path:
        """The JSONL file of result lines with an answer."""
        return self.table.with_name(f"{self.table.name}.jsonl")

    @property
    def errors(self) -> Path:
        """The JSONL file of result lines with an error."""
        return self.table.with_name(f"{self.table.name}.errors.jsonl")

    def restore(self, run_id: str) -> None:
        """Where the run had ended, write its lines anew from the table; some of them may be run again."""
        if not self.table.exists() or self.output.exists():
            return
        drafts = {path: path.with_name(f".{path.name}.draft") for path in (self.errors, self.output)}
        with storage_errors(f"writing the lines of {self.table}"):
            with drafts[self.output].open("wb") as good, drafts[self.errors].open("wb") as bad:
                for _, failed, result_line in read_result_lines(self.table, run_id):
                    (bad if failed else good).write(result_line)
                for file in (good, bad):
                    file.flush()
                    os.fsync(file.fileno())
            for path, draft in drafts.items():  # the output last: by it one knows that both are there
                draft.replace(path)

    def begin(self) -> None:
        """A new run: what an earlier one left says nothing of it."""
        with storage_errors(f"removing the table {self.table}"):
            self.table.unlink(missing_ok=True)

    def finish(self, run_id: str, total: int) -> None:
        """Make the table, and remove the lines. Raises StorageError; then they are still there."""
        write_results(merged(self.output, self.errors, [run_id], total), self.table)
        with storage_errors(f"removing the lines of {self.table}"):
            self.output.unlink(missing_ok=True)
            self.errors.unlink(missing_ok=True)
