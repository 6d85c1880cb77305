"""Batches become rows and come back with answers: one schema, other columns as they were."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from sgl_batch.control_plane.data.batches import ADDED, rows_of, with_answers
from sgl_batch.control_plane.data.row_requests import RowAnswer
from sgl_batch.errors import ConfigError

GOOD = RowAnswer(text="four", tokens=[4, 5], num_input_tokens=3)
BAD = RowAnswer(error="too long")


def test_only_the_columns_of_requests_are_read() -> None:
    table = pa.table({"prompt": ["a", None], "sampling_params": [{"top_k": 1}, None], "image": [b"x", b"y"]})
    assert rows_of(table) == [
        {"prompt": "a", "sampling_params": {"top_k": 1}},
        {"prompt": None, "sampling_params": None},
    ]


def test_numpy_s_types_in_rows_become_python_s() -> None:
    tokens = np.empty(1, dtype=object)
    tokens[0] = np.array([1, 2])
    (row,) = rows_of({"tokenized_prompt": tokens, "sampling_params": np.array([{"stop": np.array(["x"])}])})
    assert row == {"tokenized_prompt": [1, 2], "sampling_params": {"stop": ["x"]}}
    assert type(row["tokenized_prompt"][0]) is int


@pytest.mark.parametrize("answers", [[GOOD, GOOD], [GOOD, BAD], [BAD, BAD]])
def test_blocks_have_one_schema_whether_rows_failed_or_not(answers: list[RowAnswer]) -> None:
    table = with_answers(pa.table({"id": [1, 2]}), answers)
    assert table.schema == pa.schema([("id", pa.int64()), *ADDED])
    assert table.column("__inference_error__").to_pylist() == [answer.error for answer in answers]
    assert table.column("num_generated_tokens").to_pylist() == [len(answer.tokens) for answer in answers]


def test_columns_of_an_earlier_answer_are_replaced() -> None:
    once = with_answers(pa.table({"id": [1]}), [BAD])
    again = with_answers(once, [GOOD])
    assert again.column_names == once.column_names
    assert again.column("generated_text").to_pylist() == ["four"]


def test_a_batch_of_numpy_arrays_gets_numpy_arrays() -> None:
    batch = with_answers({"id": np.array([1, 2])}, [GOOD, BAD])
    assert [tokens.tolist() for tokens in batch["generated_tokens"]] == [[4, 5], []]
    assert all(tokens.dtype == np.int64 for tokens in batch["generated_tokens"])
    assert batch["__inference_error__"].tolist() == ["", "too long"]


def test_a_batch_of_another_kind_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="batch_format='pyarrow'"):
        rows_of([1, 2])
