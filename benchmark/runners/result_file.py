"""Owns the call of a measuring process: `PYTHON SCRIPT SPEC RESULT`, both JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def answer(measure: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Measure what the file SPEC says, and write the result to the file RESULT, completely or not at all.

    It is written before the engine is stopped: a stop that hangs or fails costs no finished measurement.
    """
    spec_path, result_path = map(Path, sys.argv[1:3])
    result = measure(json.loads(spec_path.read_text(encoding="utf-8")))
    partial = result_path.with_suffix(".partial")
    partial.write_text(json.dumps(result), encoding="utf-8")
    partial.replace(result_path)
