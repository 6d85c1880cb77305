"""The bytes of output and error lines."""

from __future__ import annotations

import json
import math

import pytest
from in_memory_engine import refusal

from sgl_batch.core.answers import LineResponse
from sgl_batch.errors import RequestError
from sgl_batch.jobs.result_lines import answered_result_line, refused_result_line, result_token


def test_an_output_line_has_openais_shape():
    body = {"choices": [{"text": "five"}]}
    result_line = answered_result_line("ab12", "q1", 3, LineResponse(status_code=200, request_id="req_1", body=body))
    assert result_line.endswith(b"}\n")
    assert json.loads(result_line) == {
        "id": "batch_req_ab12",
        "custom_id": "q1",
        "response": {"status_code": 200, "request_id": "req_1", "body": body},
        "error": None,
    }


def test_a_refused_line_has_the_shape_of_a_4xx_with_its_line():
    error = RequestError(code="missing_body", message="no body", param="body")
    line = json.loads(refused_result_line("ab12", None, 3, error))
    assert line["custom_id"] is None
    assert line["error"] is None
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"] == {
        "error": {
            "message": "no body",
            "type": "invalid_request_error",
            "param": "body",
            "code": "missing_body",
            "line": 3,
        }
    }


def test_an_engine_error_keeps_its_fields_and_gains_the_line():
    error = json.loads(answered_result_line("ab12", "q1", 8, refusal()))["response"]["body"]["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["line"] == 8


def test_a_flat_engine_error_is_nested_and_has_openais_words():
    body = {"object": "error", "message": "no", "type": "BadRequest", "param": None, "code": 400}
    response = LineResponse(status_code=400, request_id="req_1", body=body)
    error = json.loads(answered_result_line("ab12", "q1", 8, response))["response"]["body"]["error"]
    assert error == {"message": "no", "type": "invalid_request_error", "param": None, "code": None, "line": 8}


@pytest.mark.parametrize("text", ["a\u2028b\u2029c\u0085d\r\n\x0b\x0c\x1ee", "日本 😀", "\ud800 alone", "\x00"])
def test_a_result_line_is_one_line_whatever_its_text(text):
    response = LineResponse(status_code=200, request_id="r", body={"text": text})
    result_line = answered_result_line("ab12", text, 1, response)
    assert len(result_line.decode("utf-8").splitlines()) == 1
    assert json.loads(result_line)["response"]["body"]["text"] == text


def test_numbers_that_json_lacks_become_null():
    body = {"logprobs": [-math.inf, math.nan, -1.5]}
    result_line = answered_result_line("ab12", "q", 1, LineResponse(status_code=200, request_id="r", body=body))
    assert json.loads(result_line)["response"]["body"]["logprobs"] == [None, None, -1.5]


def test_tokens_differ_between_lines_and_runs():
    tokens = {result_token(run_id, index) for run_id in ("a", "b") for index in range(100)}
    assert len(tokens) == 200
