"""Reads the lengths of requests from a public trace of LLM inference."""

from __future__ import annotations

import csv
from pathlib import Path

from sgl_batch.errors import ConfigError


def trace_lengths(path: Path) -> list[tuple[int, int]]:
    """Return prompt and output tokens of each request of an Azure LLM trace, in order. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError(f"--trace {path} is not a file; name a CSV with ContextTokens and GeneratedTokens")
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        missing = {"ContextTokens", "GeneratedTokens"} - set(rows.fieldnames or ())
        if missing:
            raise ConfigError(f"--trace {path} has no column {' and no column '.join(sorted(missing))}")
        try:
            return [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows]
        except ValueError as error:
            raise ConfigError(f"--trace {path}, line {rows.line_num}: {error}") from error
