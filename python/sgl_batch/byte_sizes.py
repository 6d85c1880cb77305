"""Owns how sizes in bytes are read from text, and formatted for people."""

from __future__ import annotations

import re

from sgl_batch.errors import ConfigError

HOW_TO_WRITE = "a number of bytes, or one with K, M, G or T (powers of 1024): 1000000, 512M, 8G, 1.5GiB"
_LETTERS = "KMGT"
_WRITTEN = re.compile(rf"(-?\d+)|(\d+(?:\.\d+)?)\s?([{_LETTERS}])(?:iB)?", re.ASCII | re.IGNORECASE)


def parse_bytes(name: str, text: str) -> int:
    """Return the bytes that `text` says. Raises ConfigError, which names the option `name`, for any other text."""
    found = _WRITTEN.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{name} is {text!r}; it takes {HOW_TO_WRITE}")
    whole, number, letter = found.groups()
    if whole is not None:
        return int(whole)
    return int(float(number) * 1024 ** (1 + _LETTERS.index(letter.upper())))


def format_bytes(num_bytes: float) -> str:
    """Return a size as text for people, in powers of 1024."""
    size, unit = float(num_bytes), "bytes"
    for letter in _LETTERS:
        if abs(size) < 1024:
            break
        size, unit = size / 1024, f"{letter}iB"
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.2f} {unit}"
