"""Owns the tag by which the scheduler knows the choices of one request (n > 1), which share a prompt.

The tag travels in the request's prefix-cache key. Nothing else reads that key here, because we run without a radix
cache. The tokenizer manager drops keys that users give, so that no user can forge a tag.
"""

from __future__ import annotations

from dataclasses import dataclass

_MARK = "sgl_batch.choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceTag:
    """Choice `index` of `count` choices of the request `group`."""

    group: str
    index: int
    count: int

    def encode(self) -> str:
        return f"{_MARK}:{self.index}:{self.count}:{self.group}"


def decode(extra_key: str | None) -> ChoiceTag | None:
    """Return the tag in a request's key, or None for a request of one choice."""
    if extra_key is None or not extra_key.startswith(_MARK + ":"):
        return None
    parts = extra_key.split(":", 3)
    if len(parts) != 4 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        return None
    return ChoiceTag(group=parts[3], index=int(parts[1]), count=int(parts[2]))
