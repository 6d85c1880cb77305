"""Owns the queued sequences of a rank in order of arrival, and the views of them from which decisions are made.

A view costs nothing to make, however long the queue. Which sequences leave the queue, and when, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from collections.abc import Sequence as Seq
from itertools import islice
from typing import Protocol, overload, runtime_checkable

from sgl_batch.core.sequence import Sequence

_NO_PROMPTS: Mapping[str, Mapping[str, Sequence]] = {}


class SequencesView(Seq[Sequence]):
    """Sequences of a mapping, in its order, as they are when looked at; without those of some prompt groups.

    `by_prompt`: those of each prompt group, where that is known.
    """

    __slots__ = ("_by_id", "_by_prompt", "_left_out")

    def __init__(
        self,
        by_id: Mapping[str, Sequence],
        by_prompt: Mapping[str, Mapping[str, Sequence]] = _NO_PROMPTS,
        left_out: Set[str] = frozenset(),
    ) -> None:
        self._by_id, self._by_prompt, self._left_out = by_id, by_prompt, left_out

    def __len__(self) -> int:
        return len(self._by_id) - sum(len(self._by_prompt.get(group, ())) for group in self._left_out)

    def __iter__(self) -> Iterator[Sequence]:
        if not self._left_out:
            return iter(self._by_id.values())
        return (sequence for sequence in self._by_id.values() if sequence.prompt_group not in self._left_out)

    def of_prompt(self, group: str) -> list[Sequence]:
        """The sequences of a prompt group, in order."""
        return list(self._by_prompt.get(group, {}).values())

    @overload
    def __getitem__(self, index: int) -> Sequence: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sequence]: ...

    def __getitem__(self, index: int | slice) -> Sequence | list[Sequence]:
        if isinstance(index, slice) and (index.step or 1) > 0:
            return list(islice(self, *index.indices(len(self))))
        return list(self)[index]


@runtime_checkable
class KnowsPrompts(Protocol):
    """A view that finds the sequences of a prompt group without a look at the others."""

    def of_prompt(self, group: str) -> list[Sequence]:
        """The sequences of a prompt group, in order."""


def of_prompt(queued: Seq[Sequence], group: str) -> list[Sequence]:
    """The queued sequences of a prompt group, in order."""
    if isinstance(queued, KnowsPrompts):
        return queued.of_prompt(group)
    return [sequence for sequence in queued if sequence.prompt_group == group]


class SequenceQueue:
    """Queued sequences by id, and those of each prompt group."""

    def __init__(self) -> None:
        self._by_id: dict[str, Sequence] = {}
        self._by_prompt: dict[str, dict[str, Sequence]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, sequence_id: str) -> Sequence:
        return self._by_id[sequence_id]

    def add(self, sequence: Sequence) -> None:
        """Take in a sequence behind all others."""
        self._by_id[sequence.sequence_id] = sequence
        if sequence.prompt_group is not None:
            self._by_prompt.setdefault(sequence.prompt_group, {})[sequence.sequence_id] = sequence

    def remove(self, sequence_id: str) -> Sequence:
        """Take a sequence out."""
        sequence = self._by_id.pop(sequence_id)
        group = sequence.prompt_group
        if group is not None:
            del self._by_prompt[group][sequence_id]
            if not self._by_prompt[group]:
                del self._by_prompt[group]
        return sequence

    def view(self, without: Set[str] = frozenset()) -> SequencesView:
        """The queue without the sequences of some prompt groups."""
        return SequencesView(self._by_id, self._by_prompt, without)
