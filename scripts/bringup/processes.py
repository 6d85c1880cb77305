"""Owns a stage's process: its group, its log, its time limit, and its complete end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

GRACE_S = 5.0  # for a program that gets SIGTERM to write its results
GONE_S = 20.0  # a killed process frees a GPU's memory within seconds
_NAMED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b|^(?:FAILED|ERROR) |^\w+: error: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a process: its exit code, negative for a signal; None if its time was over."""

    code: int | None
    seconds: float


def run(
    argv: Sequence[str],
    log: Path,
    *,
    limit_s: float,
    environment: Mapping[str, str],
    directory: Path,
    grace_s: float,
) -> Ended:
    """Run a program in its own process group, with its output in `log`; end it with all its descendants."""
    began = time.monotonic()
    with log.open("wb") as output:
        child = subprocess.Popen(
            argv, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=directory, process_group=0
        )
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(limit_s)
        finally:
            _end(child, grace_s)
    return Ended(code=code, seconds=time.monotonic() - began)


def _end(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """End the child, its descendants in any group or session, and the rest of its group; wait until all are gone.

    Only a child that still runs is asked first.
    """
    doomed = _below(child.pid)
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace_s)
    doomed += _group(child.pid)
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    child.wait()
    until = time.monotonic() + GONE_S
    while any(map(_lives, doomed)) and time.monotonic() < until:
        time.sleep(0.01)


def _below(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
        return found
    return []


def _group(number: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == number:
                found.append(process)
    return found


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def last_error(log: Path, code: int) -> str:
    """Return why a process failed: the last line of its log that names an error, or else its exit status."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    named = [line for line in lines if _NAMED.match(line)]
    if named:
        return named[-1]
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    last = next((line for line in reversed(lines) if line), "its log is empty")
    return f"{how}: {last}"
