"""Decides which running sequences give way, where pages of the device lack or fewer may run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from sgl_batch.core.sequence import SequenceState


class VictimPolicy(Protocol):
    """Which sequences are suspended first."""

    def victims(self, running: Sequence[SequenceState], need: int) -> Iterator[SequenceState]:
        """Running sequences in the order in which they give way, as far as the caller reads.

        `need`: pages that lack, 0 where it is the number of running sequences that is too large.
        """


class MostDecoded:
    """Those that have generated most go first: they would soon ask for pages again (BatchGen 5.3)."""

    def victims(self, running: Sequence[SequenceState], need: int) -> Iterator[SequenceState]:
        return iter(sorted(running, key=lambda s: (s.generated_tokens, s.arrival), reverse=True))
