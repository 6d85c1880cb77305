"""Owns how far a run is and how fast it goes, from counts and a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

WINDOW_S = 60.0
_SAMPLE_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One moment of a run. Rates are per second over the last minute; `eta_s` is None while unknown.

    `cost`: a text, empty where no price is given.
    """

    total: int
    done: int
    failed: int
    in_flight: int
    elapsed_s: float
    tokens_in: int
    tokens_out: int
    tokens_in_per_s: float
    tokens_out_per_s: float
    eta_s: float | None
    idle_s: float  # since a line was finished or a token counted
    lines_per_s: float = 0.0
    cost: str = ""


@dataclass(frozen=True, slots=True)
class _Sample:
    time_s: float
    done: int
    tokens_in: int
    tokens_out: int


class ProgressTracker:
    """The counts of a run and the samples of the last minute. `ok` and `failed` lines were done before the run."""

    def __init__(self, total: int, clock: Callable[[], float], *, ok: int = 0, failed: int = 0) -> None:
        self.total = total
        self.ok = ok
        self.failed = failed
        self._done_before = ok + failed
        self.tokens_in = 0
        self.tokens_out = 0
        self._clock = clock
        self._start_s = clock()
        self._last_change_s = self._start_s
        self._live_tokens: tuple[int, int] | None = None
        self._samples: deque[_Sample] = deque([_Sample(self._start_s, self._done_before, 0, 0)])

    @property
    def done(self) -> int:
        """Lines that have their output or error."""
        return self.ok + self.failed

    def line_done(self, *, failed: bool, tokens_in: int = 0, tokens_out: int = 0) -> None:
        """Count one finished line with the usage that its response states."""
        if failed:
            self.failed += 1
        else:
            self.ok += 1
        self.tokens_in += tokens_in
        self.tokens_out += tokens_out
        self._last_change_s = self._clock()

    def live_tokens(self, tokens_in: int, tokens_out: int) -> None:
        """Set the tokens computed so far, unfinished lines included. From then on rates come from these."""
        if self._live_tokens != (tokens_in, tokens_out):
            self._last_change_s = self._clock()
        self._live_tokens = (tokens_in, tokens_out)

    def snapshot(self, in_flight: int = 0) -> Snapshot:
        """Return the state of the run now."""
        now = self._clock()
        tokens_in, tokens_out = self._live_tokens or (self.tokens_in, self.tokens_out)
        newest = _Sample(now, self.done, tokens_in, tokens_out)
        oldest = self._remember(newest)
        window_s = max(newest.time_s - oldest.time_s, 1e-9)
        return Snapshot(
            total=self.total,
            done=self.done,
            failed=self.failed,
            in_flight=in_flight,
            elapsed_s=now - self._start_s,
            tokens_in=tokens_in,
            tokens_out=tokens_out,
            tokens_in_per_s=max(newest.tokens_in - oldest.tokens_in, 0) / window_s,
            tokens_out_per_s=max(newest.tokens_out - oldest.tokens_out, 0) / window_s,
            eta_s=self._eta_s(newest, oldest),
            idle_s=now - self._last_change_s,
            lines_per_s=(newest.done - oldest.done) / window_s,
        )

    def _remember(self, newest: _Sample) -> _Sample:
        """Add a sample at most once a second; return the oldest that still spans the window."""
        if newest.time_s - self._samples[-1].time_s >= _SAMPLE_EVERY_S:
            self._samples.append(newest)
        while len(self._samples) > 1 and self._samples[1].time_s <= newest.time_s - WINDOW_S:
            self._samples.popleft()
        return self._samples[0]

    def _eta_s(self, newest: _Sample, oldest: _Sample) -> float | None:
        """Return the time for the remaining lines at the rate of the last minute, or of the run where that is 0."""
        if newest.done == self._done_before:
            return None if newest.done < self.total else 0.0
        finished, span_s = newest.done - oldest.done, newest.time_s - oldest.time_s
        if finished == 0:
            finished, span_s = newest.done - self._done_before, newest.time_s - self._start_s
        return (self.total - newest.done) * span_s / finished
