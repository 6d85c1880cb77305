"""Decides which running sequences are suspended first when pages of the device lack or fewer sequences may run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from sgl_batch.core.sequence import SequenceState


class VictimPolicy(Protocol):
    """The order in which running sequences are suspended."""

    def victims(self, running: Sequence[SequenceState], need: int) -> Iterator[SequenceState]:
        """Return the running sequences in the order in which they are suspended; the caller reads as many as it needs.

        `need`: number of pages that lack; 0 if too many sequences run.
        """


class MostDecoded:
    """Suspends first the sequences that have generated most: they would soon need pages again (BatchGen 5.3)."""

    def victims(self, running: Sequence[SequenceState], need: int) -> Iterator[SequenceState]:
        return iter(sorted(running, key=lambda s: (s.generated_tokens, s.arrival), reverse=True))
