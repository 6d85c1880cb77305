"""Decides which request line a row of a table becomes. A wrong line is refused later, as in a JSONL file."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from sgl_batch.errors import ConfigError
from sgl_batch.jobs.body_rules import CHAT_URL, COMPLETIONS_URL
from sgl_batch.jobs.scratch import storage_errors
from sgl_batch.jobs.tables.sources import Table, UnreadableCell


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """Which columns make a line. Without a name it is the first of `body`, `messages` and `prompt` that exists.

    `body`: fields for every line; a field in the row itself takes precedence.
    """

    model: str
    chat_column: str | None = None
    prompt_column: str | None = None
    id_column: str | None = None
    body: Mapping[str, Any] = field(default_factory=dict)


def write_lines(table: Table, rules: RowRules, target: Path) -> int:
    """Write each row as a line of a JSONL file. Return their number. Raises ConfigError and StorageError."""
    maker = _LineMaker(table, rules)
    with storage_errors(f"writing the lines of {table.path} to {target}"), target.open("wb") as file:
        return _write(table, maker, file)


def first_lines(table: Table, rules: RowRules, most: int) -> Iterator[bytes]:
    """Yield the lines of the first rows, at most so many. Raises ConfigError."""
    maker = _LineMaker(table, rules)
    for number, row in enumerate(islice(table.rows(maker.columns), most)):
        yield maker.line(number, row)


def _write(table: Table, maker: _LineMaker, file: BinaryIO) -> int:
    number = 0
    for row in table.rows(maker.columns):
        file.write(maker.line(number, row))
        number += 1
    return number


class _LineMaker:
    """Makes the lines of one table. Raises ConfigError where its columns cannot make any."""

    def __init__(self, table: Table, rules: RowRules) -> None:
        self._rules = rules
        there = set(table.columns)
        asked = [one for one in (rules.chat_column, rules.prompt_column) if one is not None]
        wanted = [*asked, *([rules.id_column] if rules.id_column else [])]
        missing = [one for one in wanted if one not in there]
        if missing:
            raise ConfigError(f"{table.path} has no column {missing[0]}; there are {', '.join(table.columns)}")
        found = asked or [one for one in ("body", "messages", "prompt") if one in there]
        if not found:
            raise ConfigError(
                f"{table.path} has no column body, messages or prompt; name the column of prompts with "
                f"--chat-column or --prompt-column; there are {', '.join(table.columns)}"
            )
        self._source = found[0]
        self._is_named = bool(asked)
        self._id_column = rules.id_column or ("custom_id" if "custom_id" in there else None)
        envelope = [one for one in ("method", "url") if one in there and not self._is_named]
        self.columns = tuple(dict.fromkeys([self._source, *envelope, *([self._id_column] if self._id_column else [])]))

    def line(self, number: int, row: Mapping[str, Any]) -> bytes:
        """Return the line of row `number`, counted from 0, with its newline."""
        url, body = self._body(row[self._source])
        head = self._head(number, row, url)
        try:
            return _encode({**head, "body": body})
        except (RecursionError, ValueError) as error:
            return _encode({**head, "body": f"unreadable: {error}"})

    def _head(self, number: int, row: Mapping[str, Any], url: str) -> dict[str, Any]:
        custom_id = f"row-{number}" if self._id_column is None else row[self._id_column]
        return {
            "custom_id": None if custom_id is None else str(custom_id),
            "method": "POST" if row.get("method") is None else row["method"],
            "url": url if row.get("url") is None else row["url"],
        }

    def _body(self, value: Any) -> tuple[str, Any]:
        """Return the body for a value of the column, and its endpoint unless the row names one."""
        if isinstance(value, UnreadableCell):
            return CHAT_URL, str(value)  # a body that is a text is refused, and the line's own error shows it
        if self._source == self._rules.chat_column:
            return CHAT_URL, self._with_rest({"messages": _messages(value)})
        if self._source == self._rules.prompt_column:
            return COMPLETIONS_URL, self._with_rest({"prompt": value})
        if self._source == "messages":
            return CHAT_URL, self._with_rest({"messages": _messages(value)})
        if self._source == "prompt":
            is_chat = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
            if is_chat:
                return CHAT_URL, self._with_rest({"messages": _messages(value)})
            return COMPLETIONS_URL, self._with_rest({"prompt": value})
        body = _parsed(value) if isinstance(value, str) else _without_nulls(value)
        if not isinstance(body, dict):
            return CHAT_URL, body
        return (CHAT_URL if "messages" in body else COMPLETIONS_URL), self._with_rest(body)

    def _with_rest(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"model": self._rules.model, **self._rules.body, **body}


def parse_body_fields(text: str) -> dict[str, Any]:
    """Parse the value of --body. Raises ConfigError."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--body is not JSON ({error}); give an object such as '{{\"max_tokens\": 64}}'") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--body is {text[:80]}; give an object such as '{{\"max_tokens\": 64}}'")
    return found


def _messages(value: Any) -> Any:
    """Return a list of messages. A text is one user message, or a list of messages as JSON."""
    if not isinstance(value, str):
        return _without_nulls(value)
    parsed = _parsed(value) if value.lstrip().startswith("[{") else value
    return parsed if isinstance(parsed, list) else [{"role": "user", "content": value}]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _without_nulls(value: Any) -> Any:
    """Remove null fields. An Arrow struct has all its fields in every row: null means that a field is absent."""
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    return value


def _encode(line: dict[str, Any]) -> bytes:
    return json.dumps(line, ensure_ascii=True, separators=(",", ":"), default=_as_text).encode("ascii") + b"\n"


def _as_text(value: Any) -> str:
    """Return the text for a value that JSON does not have: bytes, times, decimals."""
    return base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else str(value)
