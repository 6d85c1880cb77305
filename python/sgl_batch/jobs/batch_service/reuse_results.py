"""Finds the answered lines of an earlier job over the same input, for the job that continues it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sgl_batch.jobs.batch_service.finished_line import ResultLine, usage_totals
from sgl_batch.jobs.line_reader import read_lines
from sgl_batch.jobs.request_line import custom_id_of
from sgl_batch.jobs.scratch import storage_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusedLine:
    """The index of a request line, and the result line that the earlier job wrote for it."""

    index: int
    result_line: ResultLine


def successes(output: Path, input_path: Path, max_line_bytes: int) -> Iterator[ReusedLine]:
    """Yield the lines of an output file with their index in the input.

    Both files are in the same order, and each is read once. Raises StorageError.
    """
    lines = read_lines(input_path, max_line_bytes)
    with storage_errors(f"reading {output}"), output.open("rb") as file:
        for data in file:
            fields = json.loads(data)
            for raw in lines:
                if custom_id_of(raw) == fields["custom_id"]:
                    totals = usage_totals(fields["response"]["body"], failed=False)
                    yield ReusedLine(index=raw.index, result_line=ResultLine(data=data, totals=totals))
                    break
