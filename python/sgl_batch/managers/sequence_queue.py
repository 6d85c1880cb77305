"""Owns the queued sequences of a rank in order of arrival, and the views of them from which decisions are made.

A view costs nothing to make, however long the queue. Who leaves the queue, and when, is decided in core/.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from collections.abc import Sequence as Seq
from itertools import islice
from typing import overload

from sgl_batch.core.sequence import Sequence


class SequencesView(Seq[Sequence]):
    """Sequences of a mapping, in its order, as they are when looked at; without those of some prompt groups."""

    __slots__ = ("_by_id", "_left_out", "_num_left_out")

    def __init__(self, by_id: Mapping[str, Sequence], left_out: Set[str] = frozenset(), num_left_out: int = 0) -> None:
        self._by_id, self._left_out, self._num_left_out = by_id, left_out, num_left_out

    def __len__(self) -> int:
        return len(self._by_id) - self._num_left_out

    def __iter__(self) -> Iterator[Sequence]:
        if not self._left_out:
            return iter(self._by_id.values())
        return (sequence for sequence in self._by_id.values() if sequence.prompt_group not in self._left_out)

    @overload
    def __getitem__(self, index: int) -> Sequence: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sequence]: ...

    def __getitem__(self, index: int | slice) -> Sequence | list[Sequence]:
        if isinstance(index, slice) and (index.step or 1) > 0:
            return list(islice(self, *index.indices(len(self))))
        return list(self)[index]


class SequenceQueue:
    """Queued sequences by id. How many there are of each prompt group is kept, so that a view knows its length."""

    def __init__(self) -> None:
        self._by_id: dict[str, Sequence] = {}
        self._num_of_prompt: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, sequence_id: str) -> Sequence:
        return self._by_id[sequence_id]

    def add(self, sequence: Sequence) -> None:
        """Take in a sequence behind all others."""
        self._by_id[sequence.sequence_id] = sequence
        if sequence.prompt_group is not None:
            self._num_of_prompt[sequence.prompt_group] += 1

    def remove(self, sequence_id: str) -> Sequence:
        """Take a sequence out."""
        sequence = self._by_id.pop(sequence_id)
        group = sequence.prompt_group
        if group is not None:
            self._num_of_prompt[group] -= 1
            if not self._num_of_prompt[group]:
                del self._num_of_prompt[group]
        return sequence

    def view(self, without: Set[str] = frozenset()) -> SequencesView:
        """The queue without the sequences of some prompt groups; good until the next change of the queue."""
        num_left_out = sum(self._num_of_prompt[group] for group in without)
        return SequencesView(self._by_id, without, num_left_out)
