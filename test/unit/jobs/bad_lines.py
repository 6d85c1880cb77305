"""Makes lines of a batch file that are wrong in some way, or good.

Everything follows from the given random numbers, so that a line that failed once can be made again.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

URL = "/v1/completions"
FIELDS = ("custom_id", "method", "url", "body")
BODY_FIELDS = (
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "stream", "seed", "x", "temperature"),
    *("top_p", "stop", "logprobs", "logit_bias", "response_format", "custom_logit_processor", "tools", "suffix"),
)
LEAVES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**63, 10**400, 1e308, -0.0, float("nan"), float("inf"), "", "tiny", "x" * 2000),
    *("/v1/completions", "/v1/chat/completions", "POST", "GET", "\u2028\x00", "\ud800", "\U0001f600", "\ufeff"),
    *([], {}, [""], [[]], [{}], [0, -1], [10**9], [{"role": "user", "content": None}], {"type": "json_schema"}),
)
NOT_UTF8 = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xef\xbb\xbf", b"\x00", b"\r", b"\x85")
NUMBERS = (b"1e999", b"-1e999", b"NaN", b"Infinity", b"01", b"1.", b"0x1", b"9" * 5000, b"1" + b"0" * 400)

# Values that SGLang's own checks accept, in the body of a line and in a request to /generate. Most of them would end a
# scheduler that computed with them.
FATAL_BODIES: tuple[dict[str, Any], ...] = (
    *({"prompt": [10**6]}, {"prompt": [-1]}, {"prompt": [[]]}, {"n": 10**9}, {"top_k": 1 << 40}),
    *({"logprobs": 10**6}, {"logprobs": -1}, {"logprobs": 1 << 63}, {"stop_token_ids": [10**6], "min_tokens": 1}),
    *({"repetition_penalty": 1e-300}, {"logit_bias": {"5": 1e39}}, {"response_format": {"type": "structural_tag"}}),
)
FATAL_GENERATIONS: tuple[dict[str, Any], ...] = (
    *({"sampling_params": one} for one in ({"top_k": 1.5}, {"ignore_eos": 1}, {"structural_tag": ""}, {"n": 10**9})),
    *({"priority": "x"}, {"sampling_params": {"temperature": "hot"}}, {"session_id": 5}),
)


def good_line(custom_id: str, **body: Any) -> dict[str, Any]:
    """Return a good request."""
    body = {"model": "tiny", "prompt": "Say", "max_tokens": 2, **body}
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": body}


def make_line(dice: random.Random) -> bytes:
    """Return one line, without its newline."""
    return dice.choice(_KINDS)(dice).replace(b"\n", b"")


def make_request(dice: random.Random, custom_id: str) -> dict[str, Any]:
    """Return a line that a job takes and whose body only the endpoint can judge: one or two fields are arbitrary."""
    line = good_line(custom_id)
    for _ in range(dice.randrange(1, 3)):
        line["body"][dice.choice([one for one in BODY_FIELDS if one != "model"])] = _writable(_value(dice))
    return line


def _value(dice: random.Random, depth: int = 3) -> Any:
    kind = dice.randrange(8)
    if depth and kind == 0:
        return [_value(dice, depth - 1) for _ in range(dice.randrange(4))]
    if depth and kind == 1:
        return {dice.choice((*FIELDS, *BODY_FIELDS)): _value(dice, depth - 1) for _ in range(dice.randrange(4))}
    return copy.deepcopy(dice.choice(LEAVES))


def _writable(value: Any) -> Any:
    """Return the value without what a line of JSON cannot hold."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, UnicodeEncodeError):
        return None
    return value


def _bytes(dice: random.Random) -> bytes:
    return dice.randbytes(dice.randrange(60))


def _cut(dice: random.Random) -> bytes:
    data = json.dumps(good_line(f"{dice.randrange(9)}")).encode()
    return data[: dice.randrange(len(data))]


def _spliced(dice: random.Random) -> bytes:
    """Return a good line with bytes in it that are not UTF-8, or not JSON."""
    data = json.dumps(good_line(f"{dice.randrange(100)}")).encode()
    at = dice.randrange(len(data) + 1)
    return data[:at] + dice.choice(NOT_UTF8) + data[at:]


def _number(dice: random.Random) -> bytes:
    """Return a good line with a number in its body that parsers read differently."""
    data = json.dumps(good_line(f"{dice.randrange(100)}", **{dice.choice(BODY_FIELDS): "HERE"})).encode()
    return data.replace(b'"HERE"', dice.choice(NUMBERS))


def _deep(dice: random.Random) -> bytes:
    """Return nested JSON, whole or cut off, as a line by itself or in the body of a good line."""
    depth = dice.choice((3, 60, 130, 480, 950, 3000))
    opening, closing = dice.choice(((b"[", b"]"), (b'{"body":', b"}")))
    nested = opening * depth + b"1" + closing * (depth if dice.randrange(3) else 0)
    if dice.randrange(2):
        return nested
    return json.dumps(good_line(f"{dice.randrange(100)}", x="HERE")).encode().replace(b'"HERE"', nested)


def _any_json(dice: random.Random) -> bytes:
    return json.dumps(_value(dice)).encode()


def _changed(dice: random.Random) -> bytes:
    """Return a good line in which one or two fields are missing or arbitrary."""
    line = good_line(f"{dice.randrange(100)}")
    for _ in range(dice.randrange(1, 3)):
        where, fields = dice.choice([(line, FIELDS), (line.get("body"), BODY_FIELDS)])
        if not isinstance(where, dict):
            continue
        field = dice.choice(fields)
        where.pop(field, None)
        if dice.randrange(4):
            where[field] = _value(dice)
    return json.dumps(line).encode()


_KINDS: tuple[Callable[[random.Random], bytes], ...] = (
    *(_bytes, _cut, _spliced, _number, _deep, _any_json),
    *(_changed, _changed, _changed, _changed),
)
