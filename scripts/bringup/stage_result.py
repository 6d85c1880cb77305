"""Owns the call of a stage's program: `PYTHON PROGRAM SPEC RESULT`, SPEC as JSON text, RESULT the file it writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def answer(run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Run a stage, write its result, and exit: with 1 if the result has an `error`.

    `tokens` and `remark` are shown in the table.
    """
    found = run(json.loads(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
    print(json.dumps(found), flush=True)
    sys.exit(1 if "error" in found else 0)
