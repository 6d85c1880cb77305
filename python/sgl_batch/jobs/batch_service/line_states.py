"""Which lines of a running job are to do, taken or done, one byte for each; decides nothing about their order."""

from __future__ import annotations

from collections.abc import Iterable

_TO_DO, _TAKEN, _DONE = 0, 1, 2


class LineStates:
    """A line is `taken` from when it is handed out until its record is committed; then it is done."""

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
        """How many lines are done before the first that is not."""
        while self._contiguous < len(self._states) and self._states[self._contiguous] == _DONE:
            self._contiguous += 1
        return self._contiguous

    def is_to_do(self, index: int) -> bool:
        """Whether nobody has the line yet."""
        return self._states[index] == _TO_DO

    def is_done(self, index: int) -> bool:
        """Whether the line's record is committed."""
        return self._states[index] == _DONE

    def first_to_do(self) -> int | None:
        """The first line that nobody has."""
        found = self._states.find(_TO_DO)
        return None if found < 0 else found

    def take(self, index: int) -> None:
        """Hand out a line."""
        assert self._states[index] == _TO_DO, f"line {index} is already taken or done"
        self._states[index] = _TAKEN

    def finish(self, index: int) -> None:
        """The line's record is committed."""
        assert self._states[index] != _DONE, f"line {index} was already done"
        self._states[index] = _DONE
        self.num_done += 1
