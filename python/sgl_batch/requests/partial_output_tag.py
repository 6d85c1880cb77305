"""Owns how recorded tokens of a line travel to the scheduler with its request. What is done with them is decided there.

They travel in the request's prefix-cache key, as the tags of prompt_groups do; the tokenizer manager drops keys that
users give.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence

from sgl_batch.core.partial_output import PartialOutput, unpack

_MARK = "sgl_batch.recorded:"


def encode(record: PartialOutput) -> str | None:
    """The key of a request that is to go on from these tokens; None where there are none."""
    return _MARK + b64encode(record.pack()).decode("ascii") if len(record) else None


def decode(extra_key: str | None) -> Sequence[int] | None:
    """The tokens in a request's key, or None."""
    if extra_key is None or not extra_key.startswith(_MARK):
        return None
    return unpack(b64decode(extra_key[len(_MARK) :]))
