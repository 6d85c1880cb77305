"""Owns the running sequences of a simulated rank, which decode steps advance together, and those on their way back."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from sgl_batch.core.sequence import SequenceState

NEVER = 1 << 62


class DecodeGroup:
    """Running sequences. What each has generated is known from the steps since it joined, and written down on demand.

    `length_of`: the tokens that a sequence will generate, by its id.

    running: the sequences by id, in the order in which they joined.
    kv_tokens: tokens of KV that they have together.
    """

    def __init__(self, length_of: Callable[[str], int]) -> None:
        self._length_of = length_of
        self.running: dict[str, SequenceState] = {}
        self.kv_tokens = 0
        # By sequence: steps done when it joined, less the tokens that it had generated; and steps done when it ends.
        self._offset: dict[str, int] = {}
        self._end: dict[str, int] = {}
        self._ends: list[tuple[int, str]] = []
        self._done = 0

    def join(self, sequence: SequenceState) -> None:
        """Add a sequence, whose count of tokens is up to date."""
        name = sequence.sequence_id
        self.running[name] = sequence
        self._offset[name] = self._done - sequence.generated_tokens
        self.kv_tokens += sequence.kv_tokens
        self._end[name] = self._offset[name] + self._length_of(name)
        heapq.heappush(self._ends, (self._end[name], name))

    def leave(self, sequence: SequenceState) -> None:
        """Take a sequence out, with its count of tokens up to date."""
        name = sequence.sequence_id
        sequence.generated_tokens = self._done - self._offset.pop(name)
        del self.running[name], self._end[name]
        self.kv_tokens -= sequence.kv_tokens

    def up_to_date(self) -> Sequence[SequenceState]:
        """Return the sequences with their counts of tokens up to date."""
        for name, sequence in self.running.items():
            sequence.generated_tokens = self._done - self._offset[name]
        return list(self.running.values())

    def steps_to_end(self) -> int:
        """Return the steps until the next sequence ends; NEVER if none runs."""
        while self._ends:
            step, name = self._ends[0]
            if self._end.get(name) == step:
                return step - self._done
            heapq.heappop(self._ends)
        return NEVER

    def advance(self, steps: int) -> list[SequenceState]:
        """Let each sequence generate so many tokens; return those that have ended with the last one, and have left."""
        rows = len(self.running)
        if not rows:
            return []
        self._done += steps
        self.kv_tokens += steps * rows
        ended = []
        while self.steps_to_end() <= 0:
            _, name = heapq.heappop(self._ends)
            ended.append(self.running[name])
            self.leave(ended[-1])
        return ended


class Returning:
    """Sequences whose KV is copied to the device, one behind the other, with the times at which they arrive."""

    def __init__(self) -> None:
        self._coming: list[tuple[float, SequenceState]] = []
        self._begun: list[SequenceState] = []

    def __len__(self) -> int:
        return len(self._coming) + len(self._begun)

    @property
    def tokens(self) -> int:
        """Return the tokens of KV of all of them."""
        return sum(one.kv_tokens for _, one in self._coming) + sum(one.kv_tokens for one in self._begun)

    @property
    def next_at(self) -> float:
        """Return when the next one arrives; infinity if none is on its way."""
        return self._coming[0][0] if self._coming else float("inf")

    def begin(self, sequence: SequenceState) -> None:
        """Begin to bring a sequence back; `expect` says when it arrives."""
        self._begun.append(sequence)

    def expect(self, seconds: float, now: float) -> None:
        """Note that the copies that have just begun take so many seconds, behind those before them."""
        begins = max([now, *(at for at, _ in self._coming[-1:])])
        total, passed = sum(one.kv_tokens for one in self._begun), 0
        for one in self._begun:
            passed += one.kv_tokens
            self._coming.append((begins + seconds * passed / max(total, 1), one))
        self._begun = []

    def take(self, now: float, *, wait: bool) -> list[tuple[float, SequenceState]]:
        """Take those that have arrived, or with `wait` all, with the times of their arrival."""
        assert not self._begun, "it is known how long copies take"
        came = [item for item in self._coming if wait or item[0] <= now]
        self._coming = self._coming[len(came) :]
        return came
