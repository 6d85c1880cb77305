"""Owns the tag that takes the partial output of a request line to the scheduler with its request.

The tag travels in the request's prefix-cache key, as the tags of prompt_groups do. The tokenizer manager drops keys
that users give.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence

from sgl_batch.core.partial_output import PartialOutput, unpack

_MARK = "sgl_batch.recorded:"


def encode(partial_output: PartialOutput) -> str | None:
    """Return the key of a request that resumes after these tokens; None where there are none."""
    return _MARK + b64encode(partial_output.pack()).decode("ascii") if len(partial_output) else None


def decode(extra_key: str | None) -> Sequence[int] | None:
    """Return the tokens in a request's key, or None where the key has none."""
    if extra_key is None or not extra_key.startswith(_MARK):
        return None
    return unpack(b64decode(extra_key[len(_MARK) :]))
