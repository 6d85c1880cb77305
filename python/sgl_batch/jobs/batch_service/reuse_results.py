"""Finds the successes of an earlier job over the same input, for one that continues it; decides not what is run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sgl_batch.jobs.batch_service.finished_line import Record, usage_totals
from sgl_batch.jobs.line_reader import read_lines
from sgl_batch.jobs.request_line import custom_id_of
from sgl_batch.jobs.scratch import storage_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenLine:
    """A line of the input with the record that the earlier job wrote for it."""

    index: int
    record: Record


def successes(output: Path, input_path: Path, max_line_bytes: int) -> Iterator[TakenLine]:
    """The lines of an output file with their place in the input; both are in the same order, and read once.

    Raises StorageError.
    """
    lines = read_lines(input_path, max_line_bytes)
    with storage_errors(f"reading {output}"), output.open("rb") as file:
        for data in file:
            record = json.loads(data)
            for raw in lines:
                if custom_id_of(raw) == record["custom_id"]:
                    body = record["response"]["body"]
                    yield TakenLine(index=raw.index, record=Record(data=data, totals=usage_totals(body, failed=False)))
                    break
