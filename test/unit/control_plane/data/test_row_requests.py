"""What a row asks of the engine: which column counts, whose sampling parameters, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_batch.control_plane.data.row_requests import read_row
from sgl_batch.errors import RequestError


def test_tokens_come_before_a_prompt_and_a_prompt_before_messages() -> None:
    row = {"tokenized_prompt": [3, 4], "prompt": "two", "messages": [{"role": "user", "content": "two"}]}
    assert read_row(row, {}).input_ids == [3, 4]
    assert read_row({**row, "tokenized_prompt": None}, {}).prompt == "two"
    assert read_row({**row, "tokenized_prompt": None, "prompt": None}, {}).messages == row["messages"]


def test_a_row_s_sampling_parameters_come_before_those_of_all_rows_and_absent_ones_do_not_count() -> None:
    row = {"prompt": "one", "sampling_params": {"max_new_tokens": 5, "top_p": None}}
    assert read_row(row, {"max_new_tokens": 9, "top_p": 0.5}).sampling_params == {"max_new_tokens": 5, "top_p": 0.5}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "has no prompt"),
        ({"prompt": None, "messages": None}, "has no prompt"),
        ({"prompt": 7}, "'prompt' cannot be used: it is of type int"),
        ({"tokenized_prompt": ["a"]}, "whole numbers"),
        ({"tokenized_prompt": "abc"}, "whole numbers"),
        ({"messages": []}, "a list of messages"),
        ({"messages": "hello"}, "a list of messages"),
        ({"prompt": "one", "sampling_params": 3}, "must map names to values"),
        ({"prompt": "one", "sampling_params": {"n": 2}}, "a row has one answer"),
    ],
)
def test_a_row_that_is_no_request_is_refused_with_the_reason(row: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read_row(row, {})
