"""Owns the output of a run that writes a table: the JSONL files that grow, which `--resume` continues, and the table.

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
    """A table, and the JSONL files beside it until the table is whole."""

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
        """Write the JSONL files anew from the table of a run that had ended, so that it can be resumed."""
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
            for path, draft in drafts.items():  # the output last: when it exists, both exist
                draft.replace(path)

    def begin(self) -> None:
        """Remove the table of an earlier run, at the start of a new one."""
        with storage_errors(f"removing the table {self.table}"):
            self.table.unlink(missing_ok=True)

    def finish(self, run_id: str, total: int) -> None:
        """Make the table and remove the JSONL files. Raises StorageError; then the JSONL files are still there."""
        write_results(merged(self.output, self.errors, [run_id], total), self.table)
        with storage_errors(f"removing the lines of {self.table}"):
            self.output.unlink(missing_ok=True)
            self.errors.unlink(missing_ok=True)
