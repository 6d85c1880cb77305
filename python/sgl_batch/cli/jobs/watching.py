"""Follows a job to its end: polls the server, and shows what has changed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TextIO

from sgl_batch.cli.jobs.cards import ENDED, counts, extra
from sgl_batch.cli.jobs.client import Job, ServerGoneError
from sgl_batch.jobs.cost import amount_text
from sgl_batch.jobs.progress import ProgressTracker, Snapshot
from sgl_batch.jobs.progress_display import BarDisplay, ProgressDisplay, details, write_line

EVERY_S = 1.0
GONE_AFTER_S = 60.0  # a restarted server answers much sooner


class GetJob(Protocol):
    """Returns a job as it is now."""

    def __call__(self) -> Job:
        """Return the job. Raises ServerGoneError where the server does not answer."""
        ...


class ChangesDisplay:
    """One line for each change, for a log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: tuple[int, int] | None = None

    def update(self, snapshot: Snapshot) -> None:
        """Write a line if lines have finished since the last one."""
        now = (snapshot.done, snapshot.failed)
        if now != self._last:
            self._last = now
            percent = 100 * snapshot.done / max(snapshot.total, 1)
            self.note(
                f"{snapshot.done:,}/{snapshot.total:,} lines ({percent:.1f}%), "
                f"{snapshot.lines_per_s:,.1f} lines/s, {details(snapshot)}"
            )

    def note(self, message: str) -> None:
        """Write the message on a line of its own."""
        write_line(self._stream, message)

    def close(self, snapshot: Snapshot) -> None:
        """Write nothing: the last change stays."""


def choose_watch_display(stream: TextIO) -> ProgressDisplay:
    """Return a bar on a terminal, and lines elsewhere."""
    return BarDisplay(stream) if stream.isatty() else ChangesDisplay(stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """How to wait: a clock, a sleep, and how often to poll."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    every_s: float = EVERY_S
    gone_after_s: float = GONE_AFTER_S


def watch(get_job: GetJob, display: ProgressDisplay | None, waiting: Waiting | None = None) -> Job:
    """Wait until a job has ended, and return it. Without a display nothing is shown.

    Raises ServerGoneError when the server has not answered for a minute. Shorter absences are waited out.
    """
    return _Watch(get_job, display, waiting or Waiting()).run()


class _Watch:
    def __init__(self, get_job: GetJob, display: ProgressDisplay | None, waiting: Waiting) -> None:
        self._get_job = get_job
        self._display = display
        self._waiting = waiting
        self._tracker: ProgressTracker | None = None
        self._status: str | None = None
        self._text: str | None = None
        self._gone_since: float | None = None

    def run(self) -> Job:
        while True:
            job = self._ask()
            if job is not None:
                snapshot = self._show(job)
                if job.get("status") in ENDED:
                    if self._display is not None and snapshot is not None:
                        self._display.close(snapshot)
                    return job
            self._waiting.sleep(self._waiting.every_s)

    def _ask(self) -> Job | None:
        now = self._waiting.clock()
        try:
            job = self._get_job()
        except ServerGoneError as error:
            if self._gone_since is None:
                self._gone_since = now
                self._note(f"{error}. Waiting for it")
            if now - self._gone_since >= self._waiting.gone_after_s:
                raise
            return None
        if self._gone_since is not None:
            self._gone_since = None
            self._note("the server answers again")
        return job

    def _show(self, job: Job) -> Snapshot | None:
        status, text = str(job.get("status")), _problem(job)
        if status != self._status:
            self._status = status
            self._note(f"{job['id']} {status}")
        if text != self._text:
            self._text = text
            self._note(text or "the problem is solved")
        total = counts(job)[0]
        if self._display is None or not total:
            return None
        if self._tracker is None:
            _, completed, failed = counts(job)
            self._tracker = ProgressTracker(total, self._waiting.clock, ok=completed, failed=failed)
        snapshot = _snapshot(job, self._tracker)
        self._display.update(snapshot)
        return snapshot

    def _note(self, message: str) -> None:
        if self._display is not None:
            self._display.note(message)


def _snapshot(job: Job, tracker: ProgressTracker) -> Snapshot:
    """Return the job's progress: rates of our server, or else as measured here; of an ended job, those of all of it."""
    _, tracker.ok, tracker.failed = counts(job)
    more = extra(job)
    seen = tracker.snapshot(int(more.get("in_flight") or 0))
    usage, took_s = job.get("usage") or {}, _seconds(job)
    return replace(
        seen,
        tokens_in_per_s=float(more.get("tokens_in_per_s") or usage.get("input_tokens", 0) / took_s),
        tokens_out_per_s=float(more.get("tokens_out_per_s") or usage.get("output_tokens", 0) / took_s),
        lines_per_s=float(more.get("lines_per_s", seen.lines_per_s)),
        eta_s=more.get("eta_s", seen.eta_s),
        idle_s=0.0,
        cost=f"cost {amount_text(more['cost'])}" if more.get("cost") else "",
    )


def _seconds(job: Job) -> float:
    """Return how long an ended job has run; without an end, no time is short enough to give a rate."""
    began, ended = job.get("in_progress_at"), job.get(f"{job.get('status')}_at")
    return max(float(ended - began), 1.0) if began and ended and job.get("status") in ENDED else math.inf


def _problem(job: Job) -> str | None:
    """Return what stops the job, or will make it miss its window; None where nothing does."""
    more = extra(job)
    storage = more.get("storage") or {}
    if not storage.get("ok", True):
        return f"the server cannot write its jobs: {storage.get('message')}"
    if more.get("engine") == "absent":
        return "the engine is not running (it starts, or restarts); the job waits for it"
    if more.get("window_at_risk"):
        return str(more.get("window_text"))
    return None
