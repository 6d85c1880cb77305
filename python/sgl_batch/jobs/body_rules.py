"""Decides what is refused in a line's body before the engine sees it. The engine judges everything else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

from sgl_batch.errors import RequestError

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
_MEDIA_PARTS = ("image_url", "video_url", "audio_url")
_SHOWN_CHARACTERS = 80


def check_body(url: str, body: Mapping[str, object], served_model_names: Sequence[str]) -> None:
    """Raise RequestError for a fault that can be found without an engine. Each fault has its own code."""
    _check_model(body, served_model_names)
    if url == CHAT_URL:
        _check_messages(body)
    else:
        _check_prompt(body)
    for param in ("max_tokens", "max_completion_tokens"):
        _check_positive_integer(body, param, code=f"invalid_{param}", default="the model's context is the limit")
    _check_positive_integer(body, "n", code="invalid_n", default="one choice is made")
    if body.get("stream") not in (None, False):
        refuse(
            "stream_not_supported",
            f"stream is {show(body['stream'])}, but a batch line is answered once; remove it or set false",
            "stream",
        )
    if body.get("custom_logit_processor") is not None:
        refuse(
            "custom_logit_processor_not_supported",
            "custom_logit_processor carries code and is refused in batch lines; remove it",
            "custom_logit_processor",
        )


def refuse(code: str, message: str, param: str | None = None) -> NoReturn:
    """Raise the RequestError of a bad line."""
    raise RequestError(code=code, message=message, param=param, status_code=400)


def show(value: object) -> str:
    """Return a value as JSON, cut to a length that fits a message."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _check_model(body: Mapping[str, object], served_model_names: Sequence[str]) -> None:
    model = body.get("model")
    served = " or ".join(show(name) for name in served_model_names)
    if model is None:
        refuse("missing_model", f'body has no "model"; this run serves {served}', "model")
    if model not in served_model_names:
        refuse(
            "model_mismatch",
            f"model {show(model)} is not served by this run, which serves {served}; change the line, or name "
            "the model with --served-model-name",
            "model",
        )


def _check_messages(body: Mapping[str, object]) -> None:
    messages = body.get("messages")
    if messages is None:
        refuse("missing_messages", f'body has no "messages", which {CHAT_URL} needs', "messages")
    if not isinstance(messages, list):
        refuse("invalid_messages", f"messages is {show(messages)}, not a list of messages", "messages")
    if not messages:
        refuse("empty_messages", "messages is an empty list; give at least one message", "messages")
    for position, message in enumerate(messages):
        if not isinstance(message, dict):
            refuse(
                "invalid_messages",
                f'messages[{position}] is {show(message)}, not an object with "role" and "content"',
                "messages",
            )
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            _check_media(part, f"messages[{position}].content")


def _check_media(part: object, where: str) -> None:
    if not isinstance(part, dict):
        return
    for kind in _MEDIA_PARTS:
        source = part.get(kind)
        url = source.get("url") if isinstance(source, dict) else source
        if isinstance(url, str) and not url.lower().startswith("data:"):
            refuse(
                "remote_media_not_supported",
                f"{where} has the {kind} {show(url)}; a batch line carries its media itself, as data: URLs",
                "messages",
            )


def _check_prompt(body: Mapping[str, object]) -> None:
    prompt = body.get("prompt")
    if prompt is None:
        refuse("missing_prompt", f'body has no "prompt", which {COMPLETIONS_URL} needs', "prompt")
    if not isinstance(prompt, str | list):
        refuse(
            "invalid_prompt",
            f"prompt is {show(prompt)}, not a text, a list of texts or of token ids",
            "prompt",
        )
    if not prompt or (isinstance(prompt, list) and any(one in ("", []) for one in prompt)):
        refuse("empty_prompt", f"prompt is {show(prompt)}; give at least one token to continue from", "prompt")


def _check_positive_integer(body: Mapping[str, object], param: str, *, code: str, default: str) -> None:
    value = body.get(param)
    if value is None:
        return
    # In Python a bool is an int; in JSON it is not.
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        refuse(code, f"{param} is {show(value)}, but must be a whole number from 1; without it, {default}", param)
