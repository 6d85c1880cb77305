"""SGLang's answers leave without secrets, and its errors in OpenAI's shape."""

from __future__ import annotations

import pytest

from sgl_batch.api.engine_answers import as_openai_error, without_secrets


def test_secrets_are_taken_out_at_any_depth():
    content = {
        "api_key": "k",
        "admin_api_key": "k",
        "model_path": "m",
        "tokenizer_path": "t",
        "internal_states": [{"ssl_keyfile_password": "p", "exa_api_key": "e", "max_total_num_tokens": 4}],
    }
    assert without_secrets(content) == {
        "api_key": None,
        "admin_api_key": None,
        "model_path": "m",
        "tokenizer_path": "t",
        "internal_states": [{"ssl_keyfile_password": None, "exa_api_key": None, "max_total_num_tokens": 4}],
    }


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (
            {"object": "error", "message": "too long", "type": "BadRequest", "param": None, "code": 400},
            {"message": "too long", "type": "invalid_request_error", "param": None, "code": None},
        ),
        (
            {"detail": "Not Found"},
            {"message": "Not Found", "type": "invalid_request_error", "param": None, "code": None},
        ),
        (
            {"message": "m", "type": "invalid_request_error", "param": "model", "code": "model_not_found"},
            {"message": "m", "type": "invalid_request_error", "param": "model", "code": "model_not_found"},
        ),
        ("text", {"message": "text", "type": "invalid_request_error", "param": None, "code": None}),
    ],
)
def test_errors_get_the_one_shape(content, error):
    assert as_openai_error(400, content, "POST /v1/x") == {"error": error}


def test_an_error_of_that_shape_stays_as_it_is():
    content = {"type": "error", "error": {"type": "not_found_error", "message": "m"}}
    assert as_openai_error(404, content, "GET /v1/x") is content


@pytest.mark.parametrize(
    ("status", "detail", "code"), [(404, "Not Found", "not_found"), (405, "Method Not Allowed", "method_not_allowed")]
)
def test_an_error_about_the_path_names_it(status, detail, code):
    error = as_openai_error(status, {"detail": detail}, "GET /v1/x")["error"]
    assert (error["message"], error["code"]) == (f"{detail}: GET /v1/x", code)
    assert as_openai_error(status, {"detail": "no such model"}, "GET /v1/x")["error"]["message"] == "no such model"
