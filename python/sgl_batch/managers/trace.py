"""Owns the record of every sequence's changes of state, in the order in which they happened."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from typing import TextIO

from sgl_batch.core.coroutine import Transition
from sgl_batch.errors import ConfigError


class TraceWriter:
    """Writes one JSON line per transition: {"t", "sequence", "from", "to", "why"}; `t` is Unix time in seconds."""

    def __init__(self, path: str | None) -> None:
        self._file: TextIO | None = None
        if path is not None:
            try:
                self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
            except OSError as error:
                raise ConfigError(
                    f"trace_file {path!r} cannot be written ({os.strerror(error.errno or 0)}); "
                    "name a file in a directory that exists and is writable"
                ) from error

    def write(self, transitions: Iterable[Transition]) -> None:
        if self._file is None:
            return
        now = time.time()
        for change in transitions:
            event = {
                "t": round(now, 6),
                "sequence": change.sequence_id,
                "from": change.before.value,
                "to": change.after.value,
                "why": change.why,
            }
            self._file.write(json.dumps(event) + "\n")
        self._file.flush()
