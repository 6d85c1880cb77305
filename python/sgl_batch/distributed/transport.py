"""Owns the contract of a transport of tensors between ranks. Which go where, and when, is decided by others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch


def ignore() -> None:
    """The `on_done` of whoever waits for the transfer itself."""


class Transfer(Protocol):
    """One send or receive under way. Until it is done its tensors belong to it: nobody else writes (or reads) them."""

    @property
    def done(self) -> bool:
        """Whether it has ended, well or with an error that `wait` raises."""

    @property
    def moved_bytes(self) -> int:
        """Bytes moved so far, for telling a slow transfer from a stuck one."""

    def wait(self, timeout_s: float) -> None:
        """Return when all tensors are sent, or have arrived.

        Raises TransferError when it failed, PeerTimeout after `timeout_s` (it goes on then: wait again, or abandon).
        """

    def abandon(self) -> None:
        """Let go of the tensors: after this returns, none of them is read or written by the transfer any more."""


class Transport(Protocol):
    """Moves lists of tensors. Both ranks call in, with tensors of the same shapes and types in the same order.

    Transfers of one pair of ranks and one direction arrive in the order in which they were begun. Over NCCL, which
    knows no tags, the two directions of a pair must also be begun one after the other, the same first on both ranks.
    """

    def send(
        self, tensors: Sequence[torch.Tensor], peer: int, tag: int, on_done: Callable[[], None] = ignore
    ) -> Transfer:
        """Begin to send `tensors`. `on_done` is called from another thread when the transfer has ended.

        Raises TransferError when an abandoned transfer with that peer has not run out yet.
        """

    def recv(self, into: Sequence[torch.Tensor], peer: int, tag: int, on_done: Callable[[], None] = ignore) -> Transfer:
        """Begin to receive into the tensors `into`; otherwise as `send`."""
