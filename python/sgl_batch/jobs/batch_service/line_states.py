"""Owns which lines of a running job are to do, taken or done: one byte for each."""

from __future__ import annotations

from collections.abc import Iterable

_TO_DO, _TAKEN, _DONE = 0, 1, 2


class LineStates:
    """The states of one job's lines. A line is taken until its result line is committed; then it is done."""

    def __init__(self, total: int, done: Iterable[int] = ()) -> None:
        self.num_done = 0
        self._states = bytearray(total)
        self._contiguous = 0
        for index in done:
            self.finish(index)

    @property
    def total(self) -> int:
        """How many lines the job has."""
        return len(self._states)

    @property
    def contiguous(self) -> int:
        """How many lines are done before the first unfinished one."""
        while self._contiguous < len(self._states) and self._states[self._contiguous] == _DONE:
            self._contiguous += 1
        return self._contiguous

    def is_to_do(self, index: int) -> bool:
        """Return whether the line is neither taken nor done."""
        return self._states[index] == _TO_DO

    def is_done(self, index: int) -> bool:
        """Return whether the line's result line is committed."""
        return self._states[index] == _DONE

    def first_to_do(self) -> int | None:
        """Return the first line to do, or None."""
        found = self._states.find(_TO_DO)
        return None if found < 0 else found

    def take(self, index: int) -> None:
        """Mark a line as taken."""
        assert self._states[index] == _TO_DO, f"line {index} is already taken or done"
        self._states[index] = _TAKEN

    def finish(self, index: int) -> None:
        """Mark a line as done: its result line is committed."""
        assert self._states[index] != _DONE, f"line {index} was already done"
        self._states[index] = _DONE
        self.num_done += 1
