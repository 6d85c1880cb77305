"""Runs the doctor's checks in a child process. Where a check hangs or ends it, a new child runs the rest."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from sgl_batch.cli.doctor.rows import Check, Row, State

_CHILD = (sys.executable, "-m", "sgl_batch.cli.doctor.child")
_END_WITHIN_S = 2.0


def run_checks(checks: Sequence[Check], arguments: Sequence[str], child: Sequence[str] = _CHILD) -> Iterator[Row]:
    """Yield the rows of all checks in order, as they come.

    `child`: a command that runs the checks named behind `arguments`, as the module `child` does.
    """
    left, silent = list(checks), set[str]()
    while left:
        with _Child([*child, *arguments, *(check.name for check in left)]) as process:
            alive = True
            while left and alive:
                check = left.pop(0)
                answer = process.answer(check.timeout_s)
                if not isinstance(answer, str):
                    yield from (Row(**{**row, "state": State(row["state"])}) for row in answer)
                    continue
                alive = False
                silent.add(check.name)
                yield check.failed(answer)
                yield from _skipped(left, silent)


def _skipped(left: list[Check], silent: set[str]) -> Iterator[Row]:
    """Remove the checks from `left` that need the answer of a `silent` one, and yield their rows."""
    for check in list(left):
        if check.after in silent:
            left.remove(check)
            silent.add(check.name)
            yield check.failed(f"not run: the check of {check.after} gave no answer")


class _Child:
    """A process that answers each check with a line of JSON. Its log is kept, for an error when it ends too early."""

    def __init__(self, command: Sequence[str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True
        )
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Kill the process and its children. A process that is stuck in a driver cannot be killed, and stays."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_WITHIN_S)
        self._log.close()

    def _read(self) -> None:
        assert self._process.stdout is not None, "its output is a pipe"
        with self._process.stdout as lines:
            for line in lines:
                self._answers.put(line)
        self._answers.put(None)

    def answer(self, timeout_s: float) -> list[dict[str, Any]] | str:
        """Return the rows of the next check, or a text that says why there are none."""
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            return f"no answer within {timeout_s:g} s"
        if line is not None:
            rows: list[dict[str, Any]] = json.loads(line)
            return rows
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_WITHIN_S)
        return f"its process ended with {_end(self._process.returncode)}{self._last_log_line()}"

    def _last_log_line(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return f": {lines[-1][:200]}" if lines else ""


def _end(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


def directory_argument(model: Path | None) -> list[str]:
    """Return the arguments that name the model to a child."""
    return [] if model is None else ["--model", str(model)]
