"""First in, first out: sequences are prefilled in the order of their arrival."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sgl_batch.core.order.interface import Budgets, Side
from sgl_batch.core.sequence import SequenceState


class Fifo:
    """Orders sequences by arrival."""

    def __init__(self) -> None:
        self._queued: dict[str, SequenceState] = {}

    def offer(self, sequences: Iterable[SequenceState]) -> None:
        self._queued.update({sequence.sequence_id: sequence for sequence in sequences})

    def take(self, budgets: Budgets) -> Iterator[tuple[SequenceState, Side]]:
        return ((sequence, Side.HEAD) for sequence in self._queued.values())

    def drop(self, sequence_id: str) -> None:
        del self._queued[sequence_id]

    def finished(self, sequence: SequenceState, length: int) -> None:
        """Do nothing: the order does not depend on lengths."""
