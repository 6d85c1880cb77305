"""What a validator finds wrong in a body becomes one sentence with the field as the client wrote it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.body_faults import first_fault

with bootstrap.importing():
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

HELLO = {"role": "user", "content": "hi"}


def fault(body: dict[str, Any]) -> tuple[str, str | None]:
    with pytest.raises(ValidationError) as refused:
        ChatCompletionRequest.model_validate(body)
    return first_fault(refused.value.errors(), body)


@pytest.mark.parametrize(
    ("fields", "param", "texts"),
    [
        ({"seed": "x"}, "seed", ["valid integer", "(given: 'x')"]),
        ({"stop": 5}, "stop", ["valid string; or", "valid list", "(given: 5)"]),
        ({"logit_bias": {"1": "a"}}, "logit_bias.1", ["valid number"]),
        ({"messages": "hi"}, "messages", ["valid list"]),
        ({"messages": [HELLO, {"role": "robot", "content": "hi"}]}, "messages.1.role", ["'system'", "'user'"]),
        ({"messages": [{"role": "user"}]}, "messages.0.content", ["Field required"]),
        ({"messages": [{"content": "hi"}]}, "messages.0.role", ["Field required"]),
        ({"response_format": {"type": "x"}}, "response_format.type", ["'json_schema'", "'structural_tag'"]),
        ({"response_format": {"type": "structural_tag"}}, "response_format.structures", ["Field required"]),
        ({"tools": [{"type": "function"}]}, "tools.0.function", ["Field required"]),
        ({"user": 5, "seed": "x"}, "seed", ["valid integer"]),
    ],
)
def test_the_field_is_named_as_the_client_wrote_it(fields: dict[str, Any], param: str, texts: list[str]) -> None:
    message, found = fault({"messages": [HELLO], **fields})
    assert found == param
    assert message.startswith(f"{param}: ")
    assert [text for text in texts if text not in message] == []
    assert "validat" not in message


def test_a_missing_field_is_named_and_the_body_is_not_repeated() -> None:
    assert fault({"model": "m"}) == ("messages: Field required", "messages")


def test_the_places_of_fastapi_begin_with_the_body() -> None:
    error: Any = {"type": "int_parsing", "loc": ("body", "seed"), "msg": "Input should be whole", "input": "x"}
    assert first_fault([error], {"seed": "x"}) == ("seed: Input should be whole (given: 'x')", "seed")


@pytest.mark.parametrize(("body", "shown"), [([1], "a list"), (None, "null"), ("y" * 100, "'yyyyy")])
def test_a_body_that_is_no_object(body: object, shown: str) -> None:
    message, param = first_fault([{"type": "x", "loc": (), "msg": "m", "input": body}], body)
    assert param is None
    assert shown in message
    assert len(message) < 150


def test_what_is_no_json_says_where() -> None:
    invalid: Any = {"type": "json_invalid", "loc": ("body", 8), "msg": "m", "input": {}, "ctx": {"error": "no value"}}
    assert first_fault([invalid], {}) == ("the request body is no JSON: no value (at character 8)", None)
