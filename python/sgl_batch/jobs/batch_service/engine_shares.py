"""Divides the engine's time among jobs by the lines that they have in the engine.

While the engine has `n` lines of jobs, each line takes the n-th part of the time; a job's part is that of its lines.
The parts of all jobs make up the time in which the engine had a line of a job. Its other time, as that of a start, is
no job's. Requests outside jobs take no part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class EngineShare:
    """A job's part: `seconds` up to the last settlement. `lines`: how many the engine has now."""

    seconds: float = 0.0
    lines: int = 0
    settled_at: float = 0.0  # in seconds of one line


class EngineShares:
    """Settles the parts of all jobs. `clock` gives seconds; a clock that is set back adds no time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen_at = clock()
        self._num_lines = 0
        self._busy_s = 0.0
        self._line_s = 0.0  # what a line that was in the engine from the beginning would have taken

    def enter(self, share: EngineShare) -> None:
        """Account for a line that the engine gets."""
        self.settle(share)
        share.lines += 1
        self._num_lines += 1

    def leave(self, share: EngineShare) -> None:
        """Account for a line that the engine has answered, or that left it without an answer."""
        self.settle(share)
        share.lines -= 1
        self._num_lines -= 1

    def settle(self, share: EngineShare) -> None:
        """Add to a job's part the time since its last settlement."""
        self._note_time()
        share.seconds += share.lines * (self._line_s - share.settled_at)
        share.settled_at = self._line_s

    def busy_s(self) -> float:
        """Return the time in which the engine had a line of a job: the parts of all jobs together."""
        self._note_time()
        return self._busy_s

    def _note_time(self) -> None:
        now = self._clock()
        if self._num_lines:
            passed_s = max(now - self._seen_at, 0.0)
            self._busy_s += passed_s
            self._line_s += passed_s / self._num_lines
        self._seen_at = now
