"""Writes the result lines of a job as one Parquet table, a row for each line of the input, and reads them back.

The schema is always this one, whatever the answers hold.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from sgl_batch.errors import ConfigError
from sgl_batch.jobs.job_store.directory import sync_directory
from sgl_batch.jobs.result_lines import encode_result_line, result_token
from sgl_batch.jobs.scratch import StorageError, storage_errors
from sgl_batch.jobs.tables.sources import Table, need_pyarrow

# name, type in Arrow's words, meaning
COLUMNS = (
    ("row", "int64", "the input's row, from 0"),
    ("custom_id", "string", "of the request"),
    ("status_code", "int32", "200, or that of the error; null: never answered"),
    ("request_id", "string", "of the answer"),
    ("content", "string", "text of the first choice"),
    ("finish_reason", "string", "of the first choice"),
    ("prompt_tokens", "int64", "usage"),
    ("completion_tokens", "int64", "usage, of all choices"),
    ("error_code", "string", "null where the row has its answer"),
    ("error_message", "string", "likewise"),
    ("body", "string", "the whole answer as JSON"),
)
# Limits of a row group, which is in memory until it is written; and how many rows are Python objects at a time.
_GROUP_ROWS, _GROUP_BYTES, _BATCH_ROWS = 20_000, 32 << 20, 256
_REPEATED = [
    "status_code",
    "finish_reason",
    "error_code",
]  # columns with few values; no two bodies are the same, so a dictionary of them saves nothing
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

ResultLine = Mapping[str, Any]


def is_table_name(path: Path) -> bool:
    """Return whether an output of this name is a table."""
    return path.suffix == ".parquet"


def merged(output: Path, errors: Path, run_ids: Sequence[str], total: int) -> Iterator[tuple[int | None, ResultLine]]:
    """Yield all result lines of two files, each with its row, in the order of the input.

    The id of a result line names its row where a run (or job) with one of `run_ids` wrote it. The others come last,
    with None as their row.
    """
    with storage_errors(f"reading {output} and {errors}"), ExitStack() as opened:
        heads = [_Head(opened.enter_context(path.open("rb"))) for path in (output, errors) if path.exists()]
        for row in range(total):
            tokens = {f"batch_req_{result_token(run_id, row)}" for run_id in run_ids}
            for head in heads:
                if head.result_line is not None and head.result_line.get("id") in tokens:
                    yield row, head.result_line
                    head.step()
                    break
        for head in heads:
            while head.result_line is not None:
                yield None, head.result_line
                head.step()


class _Head:
    """The next result line of a file; None at the end. A torn last line counts as the end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.result_line: ResultLine | None = None
        self.step()

    def step(self) -> None:
        line = self._file.readline()
        try:
            self.result_line = json.loads(line) if line.endswith(b"\n") else None
        except ValueError as error:
            raise StorageError(f"a result line that was written is not JSON any more: {error}") from error


def write_results(result_lines: Iterable[tuple[int | None, ResultLine]], target: Path) -> int:
    """Write the table, and give it its name when it is whole and on the disk. Return how many rows it has.

    Raises StorageError.
    """
    need_pyarrow(f"writing the table {target}")
    draft = target.with_name(f".{target.name}.draft")
    try:
        with storage_errors(f"writing the table {target}"):
            num_rows = _write(result_lines, draft)
            draft.replace(target)
            sync_directory(target.parent)
    finally:
        draft.unlink(missing_ok=True)
    return num_rows


def _write(result_lines: Iterable[tuple[int | None, ResultLine]], draft: Path) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([pa.field(name, pa.type_for_alias(kind)) for name, kind, _ in COLUMNS])
    num_rows, group, group_bytes = 0, [], 0
    with draft.open("wb") as file:
        with pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=_REPEATED) as writer:
            rows = (as_row(row, result_line) for row, result_line in result_lines)
            while batch := list(islice(rows, _BATCH_ROWS)):
                group.append(pa.RecordBatch.from_pylist(batch, schema=schema))
                num_rows, group_bytes = num_rows + len(batch), group_bytes + group[-1].nbytes
                if len(group) * _BATCH_ROWS >= _GROUP_ROWS or group_bytes >= _GROUP_BYTES:
                    writer.write_table(pa.Table.from_batches(group))
                    group, group_bytes = [], 0
            if group:
                writer.write_table(pa.Table.from_batches(group))
        file.flush()
        os.fsync(file.fileno())
    return num_rows


def as_row(row: int | None, result_line: ResultLine) -> dict[str, Any]:
    """Return a result line as a row of the table."""
    response = _object(result_line.get("response"))
    body = _object(response.get("body"))
    error = _object(body.get("error")) or _object(result_line.get("error"))
    usage = _object(body.get("usage"))
    choices = body.get("choices")
    first = _object(choices[0]) if isinstance(choices, list) and choices else {}
    content = first.get("text", _object(first.get("message")).get("content"))
    code = error.get("code")
    return {
        "row": row,
        "custom_id": _text(result_line.get("custom_id")),
        "status_code": response.get("status_code"),
        "request_id": _text(response.get("request_id")),
        "content": _text(content),
        "finish_reason": _text(first.get("finish_reason")),
        "prompt_tokens": _count(usage.get("prompt_tokens")),
        "completion_tokens": _count(usage.get("completion_tokens")),
        "error_code": _text(code) if code is not None or not error else f"status_{response.get('status_code')}",
        "error_message": _text(error.get("message")),
        "body": _text(_ENCODER.encode(body)) if body else None,
    }


def read_result_lines(path: Path, run_id: str) -> Iterator[tuple[int, bool, bytes]]:
    """Yield row, whether it failed, and result line of each row of a whole table that the run with this id wrote.

    Raises ConfigError for a table without the columns of ours.
    """
    table = Table(path)
    wanted = [name for name, _, _ in COLUMNS]
    if not set(wanted) <= set(table.columns):
        raise ConfigError(f"{path} is not a table of results: it has the columns {', '.join(table.columns)}")
    for row in table.rows(["row", "custom_id", "status_code", "request_id", "body"]):
        result_line = {
            "id": f"batch_req_{result_token(run_id, row['row'])}",
            "custom_id": row["custom_id"],
            "response": {
                "status_code": row["status_code"],
                "request_id": row["request_id"],
                "body": json.loads(row["body"]),
            },
            "error": None,
        }
        yield row["row"], row["status_code"] != 200, encode_result_line(result_line)


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _text(value: Any) -> str | None:
    """Return a text for Arrow. JSON can hold half of a surrogate pair and Arrow cannot: it is escaped."""
    return None if value is None else str(value).encode("utf-8", "backslashreplace").decode("utf-8")
