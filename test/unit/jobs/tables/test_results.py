"""The table of a job's result lines: one schema, the input's order, whatever the answers hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from sgl_batch.core.answers import LineResponse
from sgl_batch.errors import ConfigError
from sgl_batch.jobs.result_lines import answered_result_line, result_token, unanswered_result_line
from sgl_batch.jobs.scratch import StorageError
from sgl_batch.jobs.tables.results import COLUMNS, as_row, merged, read_result_lines, write_results

CHAT = {
    "choices": [
        {"message": {"role": "assistant", "content": "five"}, "finish_reason": "stop"},
        {"message": {"role": "assistant", "content": "5"}, "finish_reason": "length"},
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 9},
}


def result_line(run_id: str, row: int, body: dict[str, Any], status: int = 200) -> bytes:
    response = LineResponse(status_code=status, request_id=f"req_{row}", body=body)
    return answered_result_line(result_token(run_id, row), f"id-{row}", row + 1, response)


def write(path: Path, *result_lines: bytes) -> Path:
    path.write_bytes(b"".join(result_lines))
    return path


def refusal(words: str) -> dict[str, Any]:
    return {"error": {"message": words, "type": "invalid_request_error", "param": None, "code": "bad"}}


def test_rows_of_both_files_come_in_the_order_of_the_input(tmp_path: Path) -> None:
    output = write(tmp_path / "o", *(result_line("run", row, CHAT) for row in (0, 3, 5)))
    errors = write(tmp_path / "e", *(result_line("run", row, refusal("no"), 400) for row in (1, 4)))
    target = tmp_path / "out.parquet"
    assert write_results(merged(output, errors, ["run"], 6), target) == 5
    found = pq.read_table(target)
    assert [(field.name, str(field.type)) for field in found.schema] == [(name, kind) for name, kind, _ in COLUMNS]
    rows = found.to_pylist()
    assert [row["row"] for row in rows] == [0, 1, 3, 4, 5]
    assert rows[0] | {"body": json.loads(rows[0]["body"])} == {
        "row": 0,
        "custom_id": "id-0",
        "status_code": 200,
        "request_id": "req_0",
        "content": "five",
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "completion_tokens": 9,
        "error_code": None,
        "error_message": None,
        "body": CHAT,
    }
    assert (rows[1]["status_code"], rows[1]["error_code"], rows[1]["error_message"]) == (400, "bad", "no")
    assert (rows[1]["content"], rows[1]["prompt_tokens"]) == (None, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e", "o", "out.parquet"]


def test_result_lines_of_another_server_come_last_without_a_row(tmp_path: Path) -> None:
    output = write(tmp_path / "o", result_line("run", 0, CHAT), result_line("other", 1, CHAT))
    errors = write(tmp_path / "e", result_line("earlier", 2, refusal("no"), 400))
    rows = [row for row, _ in merged(output, errors, ["run", "earlier"], 3)]
    assert rows == [0, 2, None]


def test_a_table_without_rows_has_the_same_schema(tmp_path: Path) -> None:
    assert write_results(iter(()), tmp_path / "out.parquet") == 0
    assert pq.read_schema(tmp_path / "out.parquet").names == [name for name, _, _ in COLUMNS]


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ({"choices": [{"text": "t", "finish_reason": None}]}, {"content": "t", "finish_reason": None}),
        ({"choices": [{"message": {"content": None, "tool_calls": [{}]}}]}, {"content": None}),
        ({"choices": []}, {"content": None}),
        ({"choices": [{"text": "\ud800 half"}], "usage": "x"}, {"content": "\\ud800 half", "prompt_tokens": None}),
    ],
)
def test_answers_of_any_shape_fit_the_columns(tmp_path: Path, answer: dict[str, Any], wanted: dict[str, Any]) -> None:
    given = json.loads(result_line("run", 0, answer))
    row = as_row(0, given)
    assert {name: row[name] for name in wanted} == wanted
    assert write_results([(0, given)], tmp_path / "out.parquet") == 1


def test_a_line_that_was_never_answered_has_its_error_and_no_status() -> None:
    row = as_row(4, json.loads(unanswered_result_line("t", "id-4", "batch_expired", "too late")))
    assert (row["status_code"], row["error_code"], row["error_message"]) == (None, "batch_expired", "too late")


def test_an_error_without_a_code_is_named_by_its_status() -> None:
    body = {"error": {"message": "m", "type": "t_e", "param": None, "code": None}}
    assert as_row(0, json.loads(result_line("run", 0, body, 500)))["error_code"] == "status_500"


def test_result_lines_are_read_back_byte_by_byte(tmp_path: Path) -> None:
    given = [
        result_line("run", 0, CHAT),
        result_line("run", 1, refusal("né \u2028"), 400),
        result_line("run", 2, {"x": "\ud800"}),
    ]
    output, errors = write(tmp_path / "o", given[0], given[2]), write(tmp_path / "e", given[1])
    write_results(merged(output, errors, ["run"], 3), tmp_path / "out.parquet")
    found = list(read_result_lines(tmp_path / "out.parquet", "run"))
    assert found == [(0, False, given[0]), (1, True, given[1]), (2, False, given[2])]


def test_another_table_is_not_read_as_one_of_results(tmp_path: Path) -> None:
    pq.write_table(pq.read_table(_results(tmp_path)).select(["row", "body"]), tmp_path / "other.parquet")
    with pytest.raises(ConfigError, match="not a table of results"):
        list(read_result_lines(tmp_path / "other.parquet", "run"))


def _results(directory: Path) -> Path:
    write_results([(0, json.loads(result_line("run", 0, CHAT)))], directory / "out.parquet")
    return directory / "out.parquet"


def test_what_cannot_be_written_leaves_the_old_table_and_no_draft(tmp_path: Path) -> None:
    before = _results(tmp_path).read_bytes()
    output = write(tmp_path / "o", result_line("run", 0, CHAT), b"{torn}\n")
    with pytest.raises(StorageError, match="not JSON any more"):
        write_results(merged(output, tmp_path / "e", ["run"], 2), tmp_path / "out.parquet")
    assert (tmp_path / "out.parquet").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o", "out.parquet"]
