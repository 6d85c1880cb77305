"""Order policies: one file each, all with the comparator interface of `OrderPolicy`."""

from typing import Protocol

from sgl_batch.core.sequence import Sequence


class OrderPolicy(Protocol):
    """Chooses which waiting sequence goes first."""

    def key(self, sequence: Sequence) -> tuple[int, ...]:
        """Sort key; the smallest goes first. Must be total: two sequences never share a key."""
