"""Owns one engine process: its start in its own session, its resource use, its time limit, its end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from sgl_batch.profiler.other_load import busy_s

_SAMPLE_S = 0.2
_STOP_S = 10.0
_RUNNERS = Path(__file__).resolve().parent.parent / "runners"
_ERROR_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildEnd:
    """The end of a child process: `reason` is None if it left a result.

    `cpus_of_others` is how many cores other programs kept busy meanwhile, on average: on a shared machine the
    first thing to ask of a measurement.
    """

    reason: str | None
    peak_rss_bytes: int
    took_s: float
    cpus_of_others: float


def run_child(
    python: str,
    spec: Path,
    result: Path,
    log: Path,
    *,
    limit_s: float,
    threads: int | None,
    runner: str = "run_round.py",
    environment: Mapping[str, str] | None = None,
) -> ChildEnd:
    """Run one round in a fresh process, by a script in run_round.py's directory; its output goes to `log`.

    `environment`: variables that are added to ours.

    A finished result ends the wait `_STOP_S` after it was written, whether or not the engine has stopped by then:
    the whole session is killed in any case.
    """
    result.unlink(missing_ok=True)
    began, busy, written = time.monotonic(), busy_s(), None
    usage = TreeUsage()
    with log.open("wb") as output:
        command = [python, str(_RUNNERS / runner), str(spec), str(result)]
        child = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment(threads, environment),
        )
        try:
            while child.poll() is None and time.monotonic() - began < limit_s:
                usage.sample(child.pid)
                if written is None and result.exists():
                    written = time.monotonic()
                if written is not None and time.monotonic() - written > _STOP_S:
                    break
                time.sleep(_SAMPLE_S)
        finally:
            _kill(child)
    took = time.monotonic() - began
    others_s = max(0.0, busy_s() - busy - usage.cpu_s)
    reason = None
    if not result.exists():
        timed_out = took >= limit_s
        reason = f"timed out after {limit_s:.0f} s" if timed_out else last_error(log, child.returncode)
    return ChildEnd(reason=reason, peak_rss_bytes=usage.peak_rss_bytes, took_s=took, cpus_of_others=others_s / took)


def measured_by_child(
    name: str,
    spec: Mapping[str, Any],
    out: Path,
    *,
    runner: str,
    limit_s: float,
    threads: int | None,
    environment: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], str | None]:
    """Return what a script measures in a fresh process of this interpreter, and why it measured nothing, or None.

    `spec`: what the script is told. `out`: the directory for its files, whose names begin with `name`. Others are as
    in `run_child`.
    """
    asked, result, log = (out / f"{name}.{kind}" for kind in ("spec.json", "result.json", "log"))
    asked.write_text(json.dumps(spec), encoding="utf-8")
    end = run_child(
        this_python(), asked, result, log, limit_s=limit_s, threads=threads, runner=runner, environment=environment
    )
    asked.unlink()
    return ({}, end.reason) if end.reason is not None else (json.loads(result.read_text(encoding="utf-8")), None)


def _environment(threads: int | None, more: Mapping[str, str] | None) -> dict[str, str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", **(more or {})}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


class TreeUsage:
    """The sampled resource use of a process tree: peak resident memory, and processor time so far.

    Pages that several processes share count once in each.
    """

    def __init__(self) -> None:
        self.peak_rss_bytes = 0
        self._cpu_s: dict[int, float] = {}

    @property
    def cpu_s(self) -> float:
        return sum(self._cpu_s.values())

    def sample(self, pid: int) -> None:
        """Sample the process tree of `pid` once."""
        resident = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            for process in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    resident += process.memory_info().rss
                    times = process.cpu_times()
                    self._cpu_s[process.pid] = times.user + times.system
        self.peak_rss_bytes = max(self.peak_rss_bytes, resident)


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End the child and all its descendants; SGLang's and vLLM's processes stay in its session."""
    below: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(child.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    child.wait()


def last_error(log: Path, returncode: int | None) -> str:
    """Return why a child ended without a result: the last error in its log, or its exit status."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    named = [line for line in lines if _ERROR_LINE.match(line)]
    if named:
        return named[-1][:300]
    how = f"signal {-returncode}" if returncode is not None and returncode < 0 else f"exit code {returncode}"
    return f"ended with {how} and no result; see {log.name}"


def is_installed(python: str, module: str) -> bool:
    """Return whether an interpreter finds a top-level module."""
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode == 0


def this_python() -> str:
    """Return this process's interpreter, which has every engine except, perhaps, vLLM."""
    return sys.executable
