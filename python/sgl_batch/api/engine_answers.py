"""Decides what is changed in SGLang's answers on their way to the client: the shape of errors, and secrets."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from sgl_batch.api.errors import CODES, error_body, error_type

_SECRETS = frozenset({"api_key", "admin_api_key", "ssl_keyfile_password"})
_SECRET_ENDINGS = ("_api_key", "_password", "_secret")


def without_secrets(content: Any) -> Any:
    """Return a copy without the values of keys and passwords, at any depth."""
    if isinstance(content, dict):
        return {name: None if _is_secret(str(name)) else without_secrets(value) for name, value in content.items()}
    if isinstance(content, list):
        return [without_secrets(value) for value in content]
    return content


def _is_secret(name: str) -> bool:
    return name in _SECRETS or name.endswith(_SECRET_ENDINGS)


def as_openai_error(status_code: int, content: Any, asked: str) -> Any:
    """Return an error of SGLang's endpoints as {"error": {...}}. An error of that shape stays as it is.

    `asked`: the method and path, which an error about them does not name.
    """
    if not isinstance(content, dict):
        return error_body(status_code, str(content))
    if isinstance(content.get("error"), dict):
        return content
    message = content.get("message") or content.get("detail") or content.get("error") or "the request failed"
    code, kind = content.get("code"), content.get("type")
    body = error_body(status_code, str(message), param=content.get("param"))
    # For most errors SGLang's code is the HTTP status, and its type is the reason phrase of HTTP.
    body["error"]["code"] = code if isinstance(code, str) else None
    if status_code in (404, 405) and message == HTTPStatus(status_code).phrase:
        body["error"] |= {"message": f"{message}: {asked}", "code": CODES[status_code]}
    body["error"]["type"] = kind if isinstance(kind, str) and "_" in kind else error_type(status_code)
    return body
