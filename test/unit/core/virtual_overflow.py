"""Owns the overflow of a virtual rank: sequences that have given way with all their KV, and those on their way back."""

from __future__ import annotations

from sgl_batch.core.page_ledger import pages_for
from sgl_batch.core.sequence import SequenceState


class VirtualOverflow:
    """An overflow of so many `pages`. `restore_steps`: decode steps that KV takes to come back.

    `taken`: how many sequences have come here. `returning`: those on their way back, in order.
    """

    def __init__(self, pages: int, *, restore_steps: int) -> None:
        self._pages, self._restore_steps = pages, restore_steps
        self._used: dict[str, int] = {}
        self._steps_left: list[tuple[SequenceState, int]] = []
        self.taken = 0

    @property
    def room(self) -> int:
        """Pages that are free."""
        return self._pages - sum(self._used.values())

    @property
    def returning(self) -> list[SequenceState]:
        return [sequence for sequence, _ in self._steps_left]

    def put(self, sequence: SequenceState, page_size: int) -> None:
        """Take in a sequence, for which there is room."""
        self._used[sequence.sequence_id] = pages_for(sequence.kv_tokens, page_size)
        self.taken += 1
        assert self.room >= 0, "the overflow has no room for what it takes in"

    def restore(self, sequence: SequenceState) -> None:
        """Begin to bring a sequence back."""
        assert sequence.sequence_id in self._used, "only what is away comes back"
        self._steps_left.append((sequence, self._restore_steps))

    def step(self) -> None:
        """Let a decode step pass."""
        self._steps_left = [(sequence, left - 1) for sequence, left in self._steps_left]

    def arrived(self, *, wait: bool) -> list[SequenceState]:
        """Return the sequences that are back, or all on their way if `wait`."""
        came = [sequence for sequence, left in self._steps_left if wait or left <= 0]
        self._steps_left = [(one, left) for one, left in self._steps_left if one not in came]
        for sequence in came:
            self.forget(sequence)
        return came

    def forget(self, sequence: SequenceState) -> None:
        """Free what a sequence has here, if anything."""
        self._used.pop(sequence.sequence_id, None)
