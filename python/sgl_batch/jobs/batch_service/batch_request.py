"""Checks the body of POST /v1/batches field by field; batch_creation checks the files and jobs that it names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import sha256

from sgl_batch.jobs.batch_service.fair_share import weight_of, window_s
from sgl_batch.jobs.body_rules import refuse, show
from sgl_batch.jobs.request_line import SUPPORTED_URLS

MAX_METADATA_PAIRS, MAX_KEY_CHARACTERS, MAX_VALUE_CHARACTERS = 16, 64, 512
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 2_592_000
_FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after", "continue_from")
# Fields that users write by mistake, and what they mean.
_MEANT = {
    "priority": 'metadata.priority, as in {"metadata": {"priority": "5"}}',
    "weight": 'metadata.priority, as in {"metadata": {"priority": "5"}}',
    "name": 'metadata.name, as in {"metadata": {"name": "nightly"}}',
    "title": 'metadata.name, as in {"metadata": {"name": "nightly"}}',
    "idempotency_key": "the header Idempotency-Key",
    "file_id": "input_file_id",
    "file": "input_file_id",
    "url": "endpoint",
    "window": "completion_window",
    "timeout": "completion_window",
    "expires_after": "output_expires_after",
    "continue": "continue_from",
    "batch_id": "continue_from",
    "model": '"model" in the body of each request line',
    "seed": '"seed" in the body of each request line',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """The checked body. With `continue_from`, fields that come from the continued job may be None."""

    input_file_id: str | None
    endpoint: str | None
    completion_window: str | None
    metadata: dict[str, str] | None
    output_expires_after: int | None
    continue_from: str | None


def parse_batch_request(body: Mapping[str, object]) -> BatchRequest:
    """Check the body. Raises RequestError, which names the field at fault."""
    unknown = sorted(set(body) - set(_FIELDS))
    if unknown:
        refuse("unknown_parameter", _unknown_field(unknown[0]), unknown[0])
    continue_from = _text(body, "continue_from", required=False)
    is_new = continue_from is None
    endpoint = _text(body, "endpoint", required=is_new)
    if endpoint is not None and endpoint not in SUPPORTED_URLS:
        supported = " and ".join(SUPPORTED_URLS)
        refuse("invalid_endpoint", f"endpoint {show(endpoint)} is not supported; supported are {supported}", "endpoint")
    window = _text(body, "completion_window", required=is_new)
    if window is not None:
        window_s(window)
    metadata = _metadata(body.get("metadata"))
    weight_of(metadata)
    return BatchRequest(
        input_file_id=_text(body, "input_file_id", required=is_new),
        endpoint=endpoint,
        completion_window=window,
        metadata=metadata,
        output_expires_after=parse_expiry(body.get("output_expires_after"), "output_expires_after"),
        continue_from=continue_from,
    )


def parse_expiry(value: object, param: str) -> int | None:
    """Return the seconds of {anchor: "created_at", seconds}. In a form they are text. Raises RequestError."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or value.get("anchor") != "created_at":
        refuse("invalid_expiry", f'{param} is {show(value)}; give {{"anchor": "created_at", "seconds": N}}', param)
    seconds = value.get("seconds")
    if isinstance(seconds, str) and seconds.isascii() and seconds.isdecimal() and len(seconds) < 10:
        seconds = int(seconds)
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        refuse(
            "invalid_expiry",
            f"{param}.seconds is {show(seconds)}; give a whole number from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}",
            param,
        )
    return seconds


def body_digest(body: Mapping[str, object]) -> bytes:
    """Return a digest that is equal for equal JSON objects, whatever the order of their fields."""
    return sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode("utf-8")).digest()


def _unknown_field(name: str) -> str:
    plain = name.lower().replace("-", "_")
    close = get_close_matches(plain, [*_FIELDS, *_MEANT], n=1, cutoff=0.8)
    meant = _MEANT.get(close[0], close[0]) if close else None
    hint = f"use {meant}" if meant else f"there are {', '.join(_FIELDS)}"
    return f"there is no field {show(name)}; {hint}"


def _text(body: Mapping[str, object], field: str, *, required: bool) -> str | None:
    value = body.get(field)
    if value is None and not required:
        return None
    if value is None:
        refuse("missing_required_parameter", f'the request has no "{field}"', field)
    if not isinstance(value, str):
        refuse("invalid_type", f"{field} is {show(value)}, not a text", field)
    return value


def _metadata(value: object) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        refuse("invalid_metadata", f"metadata is {show(value)}, not an object of texts", "metadata")
    if len(value) > MAX_METADATA_PAIRS:
        refuse(
            "invalid_metadata", f"metadata has {len(value)} pairs, and the limit is {MAX_METADATA_PAIRS}", "metadata"
        )
    for key, one in value.items():
        if not isinstance(one, str) or len(one) > MAX_VALUE_CHARACTERS or not 1 <= len(key) <= MAX_KEY_CHARACTERS:
            refuse(
                "invalid_metadata",
                f"metadata[{show(key)}] is {show(one)}; keys are texts of 1 to {MAX_KEY_CHARACTERS} characters, values "
                f"texts of up to {MAX_VALUE_CHARACTERS}",
                "metadata",
            )
    return dict(value)
