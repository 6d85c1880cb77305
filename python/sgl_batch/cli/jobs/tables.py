"""Turns a table into the lines that are uploaded, and a job's files into one table."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_batch.cli.jobs.cards import counts, extra
from sgl_batch.jobs.tables.results import merged, write_results
from sgl_batch.jobs.tables.row_lines import RowRules, write_lines
from sgl_batch.jobs.tables.sources import Table

if TYPE_CHECKING:
    from sgl_batch.cli.jobs.client import Job, JobsClient


def lines_of(path: Path, rules: RowRules, directory: Path) -> Path:
    """Write the rows of a table to a JSONL file, and return its path."""
    lines = directory / f"{path.stem}.jsonl"
    write_lines(Table(path), rules, lines)
    return lines


def download_table(
    client: JobsClient, job: Job, target: Path, show: Callable[[int, int | None], None], *, partial: bool
) -> int:
    """Write the output and error lines of a job as one table. Return how many rows it has."""
    from sgl_batch.cli.jobs.downloads import download, file_of

    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as directory:
        paths = Path(directory) / "output.jsonl", Path(directory) / "errors.jsonl"
        for kind, path in zip(("output", "error"), paths, strict=True):
            file_id = file_of(job, kind, partial=partial)
            if file_id is not None:
                download(client.content, file_id, path, show)
        # Result lines that a job has reused carry the id of the job that it continues.
        earlier = extra(job).get("continue_from")
        writers = [str(job["id"]), *([str(earlier)] if earlier else [])]
        return write_results(merged(*paths, writers, counts(job)[0]), target)
