"""Which line each kind of row becomes, and that no row stops the others."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sgl_batch.errors import ConfigError
from sgl_batch.jobs.line_reader import read_lines
from sgl_batch.jobs.request_line import LineRules, RefusedLine, parse_request_line
from sgl_batch.jobs.tables.row_lines import RowRules, parse_body_fields, write_lines
from sgl_batch.jobs.tables.sources import ROWS_AT_ONCE, Table, is_table

RULES = RowRules(model="tiny", body={"max_tokens": 4})
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"


def lines_of(directory: Path, table: pa.Table, rules: RowRules = RULES) -> list[dict[str, Any]]:
    pq.write_table(table, directory / "in.parquet", row_group_size=3)
    write_lines(Table(directory / "in.parquet"), rules, directory / "in.jsonl")
    return [json.loads(line) for line in (directory / "in.jsonl").read_bytes().splitlines()]


def judged(directory: Path) -> list[str]:
    """Return `ok` or the code of the error, for each line."""
    rules = LineRules(served_model_names=("tiny",))
    found = [parse_request_line(raw, rules, lambda *_: None) for raw in read_lines(directory / "in.jsonl", 1 << 20)]
    return [one.error.code if isinstance(one, RefusedLine) else "ok" for one in found]


def test_a_chat_column_becomes_user_messages(tmp_path: Path) -> None:
    table = pa.table({"question": ["2+3?", "4?"], "answer": ["5", "4"]})
    found = lines_of(tmp_path, table, RowRules(model="tiny", chat_column="question", body={"max_tokens": 4}))
    assert found == [
        {
            "custom_id": f"row-{number}",
            "method": "POST",
            "url": CHAT,
            "body": {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": text}]},
        }
        for number, text in enumerate(["2+3?", "4?"])
    ]
    assert judged(tmp_path) == ["ok", "ok"]


def test_a_column_of_prompts_is_completed_and_ids_may_be_numbers(tmp_path: Path) -> None:
    table = pa.table({"q": ["a", "b"], "key": [7, 8]})
    found = lines_of(tmp_path, table, RowRules(model="tiny", prompt_column="q", id_column="key"))
    assert [(one["custom_id"], one["url"], one["body"]["prompt"]) for one in found] == [
        ("7", COMPLETE, "a"),
        ("8", COMPLETE, "b"),
    ]


def test_messages_keep_no_nulls_of_other_rows(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b", "name": "ann"}]]
    found = lines_of(tmp_path, pa.table({"messages": messages, "custom_id": ["x", "y"]}))
    assert [one["body"]["messages"] for one in found] == messages
    assert {one["url"] for one in found} == {CHAT}


@pytest.mark.parametrize("as_text", [True, False])
def test_a_body_is_a_struct_or_json_text_and_takes_precedence(tmp_path: Path, as_text: bool) -> None:
    bodies: list[Any] = [{"prompt": "a", "max_tokens": 9}, {"prompt": "b", "model": "other"}]
    column = [json.dumps(one) for one in bodies] if as_text else bodies
    table = pa.table({"body": column, "url": [None, COMPLETE], "method": ["POST", None], "messages": ["x", "y"]})
    found = lines_of(tmp_path, table)
    assert [one["body"] for one in found] == [
        {"model": "tiny", "max_tokens": 9, "prompt": "a"},
        {"model": "other", "max_tokens": 4, "prompt": "b"},
    ]
    assert {(one["method"], one["url"]) for one in found} == {("POST", COMPLETE)}


def test_a_wrong_row_gets_its_own_error_and_the_others_run(tmp_path: Path) -> None:
    good = '{"prompt": "a"}'
    bodies = [good, None, "{not json", "[1]", "[" * 5000, '{"prompt": NaN}', '{"prompt": "\\ud800"}', good, good]
    ids = ["a", "b", "c", "d", "e", "f", "g", None, "i"]
    lines_of(tmp_path, pa.table({"body": bodies, "custom_id": ids}))
    assert judged(tmp_path) == [
        *("ok", "missing_body", "invalid_body", "invalid_body", "invalid_body", "invalid_number"),
        *("invalid_unicode", "missing_custom_id", "ok"),
    ]


def test_a_cell_that_cannot_be_read_is_its_rows_error_alone(tmp_path: Path) -> None:
    texts = [b"good", b"bad \xff", b"good"]
    offsets = pa.py_buffer(b"".join(n.to_bytes(4, "little") for n in (0, 4, 9, 13)))
    column = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"".join(texts))])
    found = lines_of(tmp_path, pa.table({"prompt": column, "custom_id": ["a", "b", "c"]}))
    assert judged(tmp_path) == ["ok", "invalid_body", "ok"]
    assert found[1]["custom_id"] == "b"
    assert "utf-8" in found[1]["body"]


def test_values_that_json_lacks_are_written_as_text(tmp_path: Path) -> None:
    body = {"prompt": "a", "when": datetime.datetime(2026, 1, 2), "raw": b"\xff"}
    [found] = lines_of(tmp_path, pa.table({"body": [body]}))
    assert (found["body"]["when"], found["body"]["raw"]) == ("2026-01-02 00:00:00", "/w==")


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (RULES, "no column body, messages or prompt; name the column of prompts .* there are question"),
        (RowRules(model="tiny", chat_column="q"), "no column q; there are question"),
        (RowRules(model="tiny", chat_column="question", id_column="key"), "no column key"),
    ],
)
def test_columns_that_are_not_there_are_named(tmp_path: Path, rules: RowRules, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        lines_of(tmp_path, pa.table({"question": ["a"]}), rules)


def in_datasets_folder(directory: Path, table: pa.Table) -> Path:
    """Write a dataset as `Dataset.save_to_disk` does: Arrow streams, and a file that names them in order."""
    folder = directory / "ds"
    folder.mkdir()
    names = [f"data-0000{number}-of-00002.arrow" for number in range(2)]
    half = table.num_rows // 2
    for name, part in zip(names, (table.slice(0, half), table.slice(half)), strict=True):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(part)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder


def test_all_kinds_of_tables_give_the_same_lines(tmp_path: Path) -> None:
    table = pa.table({"prompt": [f"p{number}" for number in range(2 * ROWS_AT_ONCE + 5)]})
    parts = tmp_path / "parts"
    parts.mkdir()
    pq.write_table(table.slice(0, 300), parts / "0.parquet")
    pq.write_table(table.slice(300), parts / "1.parquet")
    pq.write_table(table, tmp_path / "one.parquet")
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    texts = []
    for path in (tmp_path / "one.parquet", parts, tmp_path / "file.arrow", in_datasets_folder(tmp_path, table)):
        assert is_table(path)
        assert write_lines(Table(path), RULES, tmp_path / "lines") == table.num_rows
        texts.append((tmp_path / "lines").read_bytes())
    assert len(set(texts)) == 1


def test_a_file_that_is_not_a_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("{}\n")
    assert not is_table(tmp_path / "in.jsonl")
    assert not is_table(tmp_path / "absent")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match=r"cut\.parquet cannot be read"):
        Table(tmp_path / "cut.parquet")
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="neither a dataset"):
        Table(tmp_path / "none")
    (tmp_path / "splits" / "train").mkdir(parents=True)
    (tmp_path / "splits" / "dataset_dict.json").write_text("{}")
    (tmp_path / "splits" / "train" / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has the splits train; .*splits/train"):
        Table(tmp_path / "splits")


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_fields_of_all_bodies_are_an_object(text: str) -> None:
    with pytest.raises(ConfigError, match="give an object such as"):
        parse_body_fields(text)
