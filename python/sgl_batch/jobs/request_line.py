"""Parses and checks one request line, and decides whether it is refused before the engine sees it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from sgl_batch.errors import RequestError
from sgl_batch.jobs.body_rules import CHAT_URL, COMPLETIONS_URL, check_body, refuse, show
from sgl_batch.jobs.line_reader import RawLine
from sgl_batch.jobs.seeds import line_seed

SUPPORTED_URLS = (CHAT_URL, COMPLETIONS_URL)
DEFAULT_MAX_LINE_BYTES = 16 << 20

# A strict JSON parser refuses such a line, a lenient one reads it. On a server it fails alone, not its job.
INVALID_NUMBER, INVALID_UNICODE = "invalid_number", "invalid_unicode"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"the line holds {name}, which is not a JSON number; leave the field out or write null")


def _any_integer(digits: str) -> float:
    return math.nan


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_LENIENT_DECODER = json.JSONDecoder(parse_int=_any_integer)

_HALF_PAIR = "{} has half of a surrogate pair (\\ud800 to \\udfff) without the other half"

ClaimId = Callable[[str, int], int | None]
"""Remembers (custom_id, line number); returns the earlier line with this id, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRules:
    """The models and limits that lines are checked against."""

    served_model_names: Sequence[str]
    job_seed: int = 0
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLine:
    """A line that may go to the engine. Its `body` has a seed."""

    index: int
    number: int
    custom_id: str
    url: str
    body: dict[str, object]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedLine:
    """A line that is refused with its own error. `custom_id` is None where the line shows none."""

    index: int
    number: int
    custom_id: str | None
    error: RequestError


def parse_request_line(raw: RawLine, rules: LineRules, claim_id: ClaimId) -> RequestLine | RefusedLine:
    """Check one line. It raises nothing for what is in the line: a fault becomes a RefusedLine."""
    custom_id: str | None = None
    try:
        line, fault = parse_object(raw, rules.max_line_bytes)
        custom_id = parse_custom_id(line)
        refuse_repeated(custom_id, raw.number, claim_id)
        if fault is not None:
            raise fault
        url, body = parse_envelope(line)
        check_body(url, body, rules.served_model_names)
    except RequestError as error:
        return RefusedLine(index=raw.index, number=raw.number, custom_id=custom_id, error=error)
    if body.get("seed") is None:
        body["seed"] = line_seed(rules.job_seed, raw.index)
    return RequestLine(
        index=raw.index, number=raw.number, custom_id=custom_id, url=url, body=body, num_bytes=raw.num_bytes
    )


def claim_custom_id(raw: RawLine, rules: LineRules, claim_id: ClaimId) -> None:
    """Claim the id of a line that does not run again, if it shows one, so that a later line cannot repeat it."""
    with suppress(RequestError):
        line, _ = parse_object(raw, rules.max_line_bytes)
        refuse_repeated(parse_custom_id(line), raw.number, claim_id)


def custom_id_of(raw: RawLine) -> str | None:
    """Return the line's custom_id, or None where it shows none."""
    try:
        return parse_custom_id(parse_object(raw, raw.num_bytes)[0])
    except RequestError:
        return None


def parse_object(raw: RawLine, max_line_bytes: int) -> tuple[dict[str, object], RequestError | None]:
    """Return the line as a JSON object, and a fault in it that a lenient parser accepts. Raises RequestError."""
    if raw.data is None:
        refuse(
            "line_too_long",
            f"the line has {raw.num_bytes:,} bytes and the limit is {max_line_bytes:,}; shorten it or raise "
            "--max-line-bytes",
        )
    try:
        value, fault = _decode(raw.data.decode("utf-8"))
    except UnicodeDecodeError as error:
        refuse("invalid_json_line", f"the line is not UTF-8: {error.reason} at byte {error.start}")
    except RecursionError:
        refuse("invalid_json_line", "the line's JSON is nested too deeply")
    except ValueError as error:
        refuse("invalid_json_line", f"the line is not valid JSON: {error}")
    if not isinstance(value, dict):
        refuse(
            "line_not_an_object",
            f"the line is {show(value)}, not a JSON object with custom_id, method, url and body",
        )
    return value, fault


def _decode(text: str) -> tuple[object, RequestError | None]:
    """Return the JSON value of a text, and the fault of a number or text in it that JSON does not allow."""
    fault = None
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # a number: NaN, or with more digits than Python reads
        fault = RequestError(code=INVALID_NUMBER, message=_of_line(error))
        value = _LENIENT_DECODER.decode(text)
    if ("\\ud" in text or "\\uD" in text) and not _is_unicode(value):
        fault = RequestError(code=INVALID_UNICODE, message=_HALF_PAIR.format("the line"))
    return value, fault


def _of_line(error: ValueError) -> str:
    text = str(error)
    return text if text.startswith("the line") else f"the line has a number that cannot be read: {text.split(';')[0]}"


def _is_unicode(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def refuse_repeated(custom_id: str, number: int, claim_id: ClaimId) -> None:
    """Claim the custom_id for line `number`. Raises RequestError where an earlier line has it."""
    earlier = claim_id(custom_id, number)
    if earlier is not None:
        refuse(
            "duplicate_custom_id",
            f"custom_id {show(custom_id)} was already used in line {earlier}; every line needs its own",
            "custom_id",
        )


def parse_custom_id(line: dict[str, object]) -> str:
    """Return the line's custom_id. Raises RequestError."""
    custom_id = line.get("custom_id")
    if custom_id is None:
        refuse("missing_custom_id", 'the line has no "custom_id"; give each line a text of its own', "custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        refuse(
            "invalid_custom_id",
            f"custom_id is {show(custom_id)}, but must be a text that is not empty",
            "custom_id",
        )
    if not _is_unicode(custom_id):
        refuse(INVALID_UNICODE, _HALF_PAIR.format(f"custom_id {show(custom_id)}"), "custom_id")
    return custom_id


def parse_envelope(line: dict[str, object]) -> tuple[str, dict[str, object]]:
    """Return the url and the body of a line. Raises RequestError."""
    method, url, body = line.get("method"), line.get("url"), line.get("body")
    supported = " and ".join(SUPPORTED_URLS)
    if method is None:
        refuse("missing_method", 'the line has no "method"; write "method": "POST"', "method")
    if method != "POST":
        refuse("invalid_method", f'method is {show(method)}; the only one is "POST"', "method")
    if url is None:
        refuse("missing_url", f'the line has no "url"; supported are {supported}', "url")
    if url not in SUPPORTED_URLS:
        refuse("url_not_supported", f"url {show(url)} is not supported; supported are {supported}", "url")
    if body is None:
        refuse("missing_body", 'the line has no "body", the request itself', "body")
    if not isinstance(body, dict):
        refuse("invalid_body", f"body is {show(body)}, not a JSON object", "body")
    return str(url), body
