"""Reads what the engine is asked from one row of a dataset, and owns the columns that its answer adds. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sgl_batch.errors import RequestError

# Columns that are read. A row has one of the first three; the first that it has counts.
TOKENS, PROMPT, MESSAGES = "tokenized_prompt", "prompt", "messages"
SAMPLING = "sampling_params"
INPUTS = (TOKENS, PROMPT, MESSAGES, SAMPLING)

# Columns that are added. All rows have all of them.
TEXT, GENERATED = "generated_text", "generated_tokens"
NUM_INPUT, NUM_GENERATED = "num_input_tokens", "num_generated_tokens"
ERROR = "__inference_error__"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRequest:
    """What the engine is asked for one row: one of `input_ids`, `prompt` and `messages`, and how to sample."""

    input_ids: list[int] | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    sampling_params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAnswer:
    """The engine's answer to one row, or the reason why there is none: then `error` is not empty, and all else is."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    num_input_tokens: int = 0
    error: str = ""


def read_row(row: Mapping[str, Any], defaults: Mapping[str, Any]) -> RowRequest:
    """Return the request of one row.

    Args:
        row: The columns of INPUTS that the dataset has, as Python values. None: the row lacks that value.
        defaults: Sampling parameters for all rows. A row's own come before them.

    Raises:
        RequestError: The row is no request. The engine checks the values themselves.
    """
    sampling = {**defaults, **_sampling(row.get(SAMPLING))}
    if sampling.get("n") not in (None, 1):
        raise _refused(SAMPLING, f"n is {sampling['n']!r}, and a row has one answer: repeat the row instead")
    tokens, prompt, messages = row.get(TOKENS), row.get(PROMPT), row.get(MESSAGES)
    if tokens is not None:
        return RowRequest(input_ids=_tokens(tokens), sampling_params=sampling)
    if prompt is not None:
        if not isinstance(prompt, str):
            raise _refused(PROMPT, f"it is of type {type(prompt).__name__}, and must be text")
        return RowRequest(prompt=prompt, sampling_params=sampling)
    if messages is not None:
        return RowRequest(messages=_messages(messages), sampling_params=sampling)
    raise RequestError(
        code="missing_prompt",
        message=f"the row has no prompt: give it a value in the column {PROMPT!r}, {MESSAGES!r} or {TOKENS!r}",
    )


def _sampling(given: object) -> dict[str, Any]:
    """Return a row's sampling parameters. In a column of structs a row has all names, with None for what it lacks."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise _refused(SAMPLING, f"it is of type {type(given).__name__}, and must map names to values")
    return {str(name): value for name, value in given.items() if value is not None}


def _tokens(given: object) -> list[int]:
    if not isinstance(given, list) or not all(type(token) is int for token in given):
        raise _refused(TOKENS, "it must be a list of whole numbers, the ids of tokens")
    return given


def _messages(given: object) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given or not all(isinstance(one, Mapping) for one in given):
        raise _refused(MESSAGES, "it must be a list of messages, each with a role and a content")
    return [{str(name): value for name, value in one.items() if value is not None} for one in given]


def _refused(column: str, why: str) -> RequestError:
    return RequestError(code="invalid_row", message=f"the column {column!r} cannot be used: {why}", param=column)
