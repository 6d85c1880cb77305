"""Owns the record of every sequence's changes of state and of every decision, in the order in which they happened."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from typing import BinaryIO

from sgl_batch.core.coroutine import Transition
from sgl_batch.errors import ConfigError


class TraceWriter:
    """Writes JSON lines: changes of state {"t", "sequence", "from", "to", "why"}, and decisions as core records them.

    `t` is Unix time in seconds. Ranks, and engines after each other, append to the same file: a decision has the `rank`
    of its engine, and the time at which that process began as `engine`.
    """

    def __init__(self, path: str | None, rank: int = 0) -> None:
        self._file: BinaryIO | None = None
        self._engine = {"engine": round(time.time(), 3), "rank": rank}
        if path is not None:
            try:
                # Unbuffered: what a rank writes at once stays together.
                self._file = open(path, "ab", buffering=0)  # noqa: SIM115
            except OSError as error:
                raise ConfigError(
                    f"trace_file {path!r} cannot be written ({os.strerror(error.errno or 0)}); "
                    "name a file in a directory that exists and is writable"
                ) from error

    @property
    def is_open(self) -> bool:
        """Whether anything is written."""
        return self._file is not None

    def write(self, transitions: Iterable[Transition]) -> None:
        """Write changes of state."""
        if self._file is None:
            return
        now = time.time()
        self._append(
            {
                "t": round(now, 6),
                "sequence": change.sequence_id,
                "from": change.before.value,
                "to": change.after.value,
                "why": change.why,
            }
            for change in transitions
        )

    def write_decision(self, record: Mapping[str, object]) -> None:
        """Write a decision with its actions."""
        self._append([{"t": round(time.time(), 6), **self._engine, **record}])

    def _append(self, events: Iterable[Mapping[str, object]]) -> None:
        assert self._file is not None, "there is no file"
        data = "".join(json.dumps(event) + "\n" for event in events)
        if data:
            self._file.write(data.encode("utf-8"))
