"""Makes result lines: the bytes of a line of an output or error file, in OpenAI's shape."""

from __future__ import annotations

import json
import math
from hashlib import blake2b

from sgl_batch.core.answers import LineResponse
from sgl_batch.errors import RequestError

# JSON allows these characters unescaped, but many programs take them for the end of a line.
_LINE_SEPARATORS = {"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_ASCII_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def result_token(run_id: str, index: int) -> str:
    """Return 24 hexadecimal digits, unique to this line of this run."""
    return blake2b(f"{run_id}:{index}".encode(), digest_size=12).hexdigest()


def answered_result_line(token: str, custom_id: str, line: int, response: LineResponse) -> bytes:
    """Return the result line of a line that the engine answered; response.body.error has the error, if it failed."""
    body = response.body
    if response.status_code != 200:
        body = {"error": error_of(response, line)}
    return _encode(token, custom_id, response.status_code, response.request_id, body)


def refused_result_line(token: str, custom_id: str | None, line: int, error: RequestError) -> bytes:
    """Return the result line of a line refused before the engine saw it, in the shape of the engine's own 4xx."""
    body: dict[str, object] = {
        "error": {
            "message": error.message,
            "type": "invalid_request_error",
            "param": error.param,
            "code": error.code,
            "line": line,
        }
    }
    return _encode(token, custom_id, error.status_code, f"req_{token}", body)


def unanswered_result_line(token: str, custom_id: str | None, code: str, message: str) -> bytes:
    """Return the result line of a line without an answer, because its job expired or was cancelled."""
    error = {"code": code, "message": message}
    return encode_result_line({"id": f"batch_req_{token}", "custom_id": custom_id, "response": None, "error": error})


def engine_crashed_response(token: str) -> LineResponse:
    """Return the answer for a line that killed the engine twice, the second time while it ran alone."""
    fields: dict[str, object] = {
        "message": "the engine died while it ran this line, and once more when it ran this line alone; the other lines "
        "of the job were not touched. Look for the reason in the engine's log",
        "type": "server_error",
        "param": None,
        "code": "engine_crashed",
    }
    return LineResponse(status_code=500, request_id=f"req_{token}", body={"error": fields})


def internal_error_response(token: str, error: BaseException) -> LineResponse:
    """Return the answer for a line on which the engine raised an unexpected exception."""
    message = f"the engine failed on this line: {type(error).__name__}: {error}"
    fields: dict[str, object] = {
        "message": message,
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    return LineResponse(status_code=500, request_id=f"req_{token}", body={"error": fields})


def error_of(response: LineResponse, line: int) -> dict[str, object]:
    """Return a failed response's error in one shape, whether the engine nests it under "error" or gives it flat."""
    nested = response.body.get("error")
    given = nested if isinstance(nested, dict) else response.body
    kind = "invalid_request_error" if response.status_code < 500 else "server_error"
    code, given_kind = given.get("code"), given.get("type")
    return {
        "message": given.get("message") or f"the engine answered with status {response.status_code}",
        # For most errors SGLang's code is the HTTP status, and its type is the reason phrase of HTTP.
        "type": given_kind if isinstance(given_kind, str) and "_" in given_kind else kind,
        "param": given.get("param"),
        "code": code if isinstance(code, str) else None,
        "line": line,
    }


def _encode(token: str, custom_id: str | None, status_code: int, request_id: str, body: dict[str, object]) -> bytes:
    fields: dict[str, object] = {
        "id": f"batch_req_{token}",
        "custom_id": custom_id,
        "response": {"status_code": status_code, "request_id": request_id, "body": body},
        "error": None,
    }
    return encode_result_line(fields)


def encode_result_line(fields: dict[str, object]) -> bytes:
    """Return the bytes of a result line, with its newline."""
    try:
        text = _ENCODER.encode(fields)
        for raw, escaped in _LINE_SEPARATORS.items():
            text = text.replace(raw, escaped)
        return text.encode("utf-8") + b"\n"
    except ValueError:  # not JSON: NaN or an infinity, or half of a surrogate pair
        return _ASCII_ENCODER.encode(_without_infinities(fields)).encode("ascii") + b"\n"


def _without_infinities(value: object) -> object:
    """Return the value with null for NaN and infinities (the logarithm of zero, say), as online servers write them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_infinities(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(one) for one in value]
    return value
