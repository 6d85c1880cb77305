"""Owns input lines of a job or a run that cannot be answered as they ask, and the errors that they must get."""

from __future__ import annotations

import json
from typing import Any

from .conftest import chat_line

LOOP = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
# After its first letter no text completes this grammar.
DEAD_END = 'root ::= "a" x\nx ::= x'
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]

# Fields that make a chat odd, and the code and the field of its error.
ODD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": LOOP}, "invalid_grammar", "response_format"),
    ({"ebnf": "root ::= root"}, "invalid_grammar", "ebnf"),
    ({"ebnf": DEAD_END}, "invalid_grammar", "ebnf"),
    ({"ebnf": DEAD_END, "n": 2}, "invalid_grammar", "ebnf"),
    ({"regex": "("}, "invalid_grammar", "regex"),
    ({"messages": IMAGE}, "unsupported_field", "messages"),
    ({"input_embeds": [[0.5, 0.5]]}, "unsupported_field", "input_embeds"),
    ({"bootstrap_host": "127.0.0.1"}, "unsupported_field", "bootstrap_host"),
    ({"max_new_tokens": 5}, "unknown_field", "max_new_tokens"),
    ({"max_token": 5}, "unknown_field", "max_token"),
    ({"seed": 1 << 64}, "invalid_value", "seed"),
    ({"top_p": 2}, "invalid_value", "top_p"),
    ({"min_tokens": 5, "max_tokens": 2}, "invalid_value", "min_tokens"),
    ({"max_tokens": 1 << 20}, "context_length_exceeded", None),
    ({"messages": [{"role": "robot", "content": "Say."}]}, "invalid_value", "messages.0.role"),
]
HARMLESS = {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "unknown_to_all": 5}


def odd_input() -> bytes:
    """Return the lines of a job: odd ones, JSON that a strict parser refuses, and good ones between them."""
    lines = [json.dumps(chat_line(f"odd {n}", "Say.", **fields)) for n, (fields, _, _) in enumerate(ODD_CHATS)]
    lines.insert(1, json.dumps(chat_line("good 0", "Say.", max_tokens=4, **HARMLESS)))
    lines.append(json.dumps(chat_line("nan", "Say.", top_p=float("nan"))))
    lines.append(json.dumps(chat_line("half a pair", "\ud83d")))
    lines.append(json.dumps(chat_line("\ud83d", "Say.")))
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}
    lines.append(json.dumps(chat_line("good 1", "Say.", response_format=schema)))
    return "\n".join(lines).encode()


def check_result_lines(output: list[dict[str, Any]], errors: list[dict[str, Any]]) -> None:
    """Check that each line of `odd_input` has its output or its error."""
    assert [line["custom_id"] for line in output] == ["good 0", "good 1"]
    assert output[1]["response"]["body"]["choices"][0]["message"]["content"] in ("true", "false")
    found = [(line["custom_id"], line["response"]["body"]["error"]) for line in errors]
    assert {line["response"]["status_code"] for line in errors} == {400}
    expected = [(f"odd {n}", code, param) for n, (_, code, param) in enumerate(ODD_CHATS)]
    expected += [("nan", "invalid_number", None), ("half a pair", "invalid_unicode", None)]
    expected += [(None, "invalid_unicode", "custom_id")]
    assert [(custom_id, error["code"], error["param"]) for custom_id, error in found] == expected
    assert all(error["message"] and error["type"] == "invalid_request_error" for _, error in found)
