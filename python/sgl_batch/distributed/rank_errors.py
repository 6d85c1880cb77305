"""Owns the errors that name a rank. Their handlers decide what becomes of that rank and of its sequences."""

from __future__ import annotations

from collections.abc import Iterable

from sgl_batch.errors import EngineError


def _names(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return ("rank " if len(listed) == 1 else "ranks ") + ", ".join(map(str, listed))


class RankError(EngineError):
    """Something between this rank and another failed. `rank` is the other one; None where it is not known."""

    def __init__(self, rank: int | None, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class PeerTimeout(RankError):  # noqa: N818 (the name says which error it is)
    """A rank did not act in time. It may be alive, so nothing can be concluded about what it holds."""

    def __init__(self, ranks: Iterable[int], *, awaiting: str, seconds: float) -> None:
        listed = sorted(ranks)
        super().__init__(
            listed[0] if len(listed) == 1 else None,
            f"{_names(listed)}: waited {seconds:.3g} s for {awaiting}; "
            "it may be hung or slow: look at its log, or allow more seconds",
        )
        self.ranks = tuple(listed)


class PeerLost(RankError):  # noqa: N818
    """A rank's end of the connection is gone: its process died or closed its channel. It never comes back."""

    def __init__(self, rank: int, *, awaiting: str, seconds: float) -> None:
        super().__init__(
            rank,
            f"rank {rank} closed its connection (its process died, or ended) "
            f"{seconds:.3g} s into waiting for {awaiting}; look at the end of that rank's log",
        )
        self.seconds = seconds


class BadMessage(RankError):  # noqa: N818
    """A message cannot be decoded. It is dropped and the channel goes on; its receiver decides what follows."""


class TransferError(RankError):
    """A transfer of tensors failed. The rank may be alive: only the channel says that it is lost."""
