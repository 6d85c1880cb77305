"""Owns the queued sequences of a rank, in the order of its policy, and the views that decisions read.

Making a view costs the same for any length of the queue. Which sequences leave the queue, and when, is decided
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice
from typing import Protocol, overload, runtime_checkable

from sgl_batch.core.order.fifo import Fifo
from sgl_batch.core.order.interface import Budgets, OrderPolicy
from sgl_batch.core.sequence import SequenceState

_UNBOUNDED = Budgets(tokens=1 << 62, pages=1 << 62)


class SequencesView(Sequence[SequenceState]):
    """A live view of the sequences of a mapping, in its order."""

    __slots__ = ("_by_id",)

    def __init__(self, by_id: Mapping[str, SequenceState]) -> None:
        self._by_id = by_id

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._by_id.values())

    @overload
    def __getitem__(self, index: int) -> SequenceState: ...

    @overload
    def __getitem__(self, index: slice) -> list[SequenceState]: ...

    def __getitem__(self, index: int | slice) -> SequenceState | list[SequenceState]:
        return _item(self, index)


def _item(view: Sequence[SequenceState], index: int | slice) -> SequenceState | list[SequenceState]:
    """Return an item or a slice of a view; the head of a view is read without a copy of the rest."""
    if isinstance(index, slice) and (index.step or 1) > 0:
        return list(islice(view, *index.indices(len(view))))
    return list(view)[index]


@runtime_checkable
class KnowsPrompts(Protocol):
    """A view that finds the sequences of a prompt group without reading the others."""

    def of_prompt(self, group: str) -> list[SequenceState]:
        """Return the sequences of a prompt group, in order of arrival."""


def of_prompt(queued: Sequence[SequenceState], group: str) -> list[SequenceState]:
    """Return the queued sequences of a prompt group, in order."""
    if isinstance(queued, KnowsPrompts):
        return queued.of_prompt(group)
    return [sequence for sequence in queued if sequence.prompt_group == group]


class SequenceQueue:
    """The queued sequences by id, by prompt group, and in the order of the policy.

    `tokens`: prompt tokens of all of them.
    """

    def __init__(self, order: OrderPolicy | None = None) -> None:
        self.order: OrderPolicy = Fifo() if order is None else order
        self._by_id: dict[str, SequenceState] = {}
        self._by_prompt: dict[str, dict[str, SequenceState]] = {}
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, sequence_id: str) -> SequenceState:
        return self._by_id[sequence_id]

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._by_id.values())

    def add(self, sequence: SequenceState) -> None:
        """Add a sequence that has arrived after all others."""
        self._by_id[sequence.sequence_id] = sequence
        self.tokens += sequence.prompt_tokens
        if sequence.prompt_group is not None:
            self._by_prompt.setdefault(sequence.prompt_group, {})[sequence.sequence_id] = sequence
        self.order.offer((sequence,))

    def remove(self, sequence_id: str) -> SequenceState:
        """Remove a sequence and return it."""
        sequence = self._by_id.pop(sequence_id)
        self.tokens -= sequence.prompt_tokens
        self.order.drop(sequence_id)
        group = sequence.prompt_group
        if group is not None:
            del self._by_prompt[group][sequence_id]
            if not self._by_prompt[group]:
                del self._by_prompt[group]
        return sequence

    def replace(self, sequences: Iterable[SequenceState]) -> None:
        """Replace all queued sequences by these, which are in order of arrival."""
        for name in list(self._by_id):
            self.remove(name)
        for sequence in sequences:
            self.add(sequence)

    def of_prompt(self, group: str) -> list[SequenceState]:
        """Return the sequences of a prompt group, in order of arrival."""
        return list(self._by_prompt.get(group, {}).values())

    def view(self, without: Set[str] = frozenset(), budgets: Budgets = _UNBOUNDED) -> QueueView:
        """Return a live view of the queue in the order of its policy, without the prompt groups `without`."""
        return QueueView(self, without, budgets)


class QueueView(Sequence[SequenceState]):
    """A live view of a queue."""

    __slots__ = ("_budgets", "_left_out", "_queue")

    def __init__(self, queue: SequenceQueue, left_out: Set[str], budgets: Budgets) -> None:
        self._queue, self._left_out, self._budgets = queue, left_out, budgets

    def __len__(self) -> int:
        return len(self._queue) - sum(len(self._queue.of_prompt(group)) for group in self._left_out)

    def __iter__(self) -> Iterator[SequenceState]:
        taken = (sequence for sequence, _ in self._queue.order.take(self._budgets))
        if not self._left_out:
            return taken
        return (sequence for sequence in taken if sequence.prompt_group not in self._left_out)

    def of_prompt(self, group: str) -> list[SequenceState]:
        """Return the sequences of a prompt group, in order of arrival."""
        return self._queue.of_prompt(group)

    @overload
    def __getitem__(self, index: int) -> SequenceState: ...

    @overload
    def __getitem__(self, index: slice) -> list[SequenceState]: ...

    def __getitem__(self, index: int | slice) -> SequenceState | list[SequenceState]:
        return _item(self, index)
