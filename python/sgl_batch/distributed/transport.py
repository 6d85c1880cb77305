"""Owns the contract of a transport of tensors between ranks. Its callers decide which tensors go where, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch


def ignore() -> None:
    """The `on_done` of a caller that waits for the transfer itself."""


class Transfer(Protocol):
    """One send or receive under way.

    Its tensors belong to it until it is done or abandoned. Until then the caller must not write the tensors of a send,
    and must neither read nor write those of a receive.
    """

    @property
    def done(self) -> bool:
        """Whether it has ended, with success or with an error. `wait` raises that error."""

    @property
    def moved_bytes(self) -> int:
        """Bytes moved so far: they grow in a slow transfer, and not in a stuck one."""

    def wait(self, timeout_s: float) -> None:
        """Wait until all tensors are sent, or all have arrived.

        Args:
            timeout_s: how long to wait at most, in seconds. 0 asks for the result of a transfer that is done.

        Raises:
            TransferError: the transfer has failed. Tensors of a receive may be written in part.
            PeerTimeout: it did not end within `timeout_s`. It continues: wait again, or abandon it.
        """

    def abandon(self) -> None:
        """Give the tensors back to the caller: after this returns, the transfer neither reads nor writes them.

        The transfer itself continues without them, so that the peer's side can end. Until it is done, no other transfer
        with that peer can begin.
        """


class Transport(Protocol):
    """Moves lists of tensors between two ranks.

    For each `send` of one rank the other rank calls `recv`, with tensors of the same shapes and types in the same
    order. Transfers between one pair of ranks in one direction arrive in the order in which they were begun. Over NCCL,
    which knows no tags, both ranks must also begin the two directions in the same order.
    """

    def send(
        self, tensors: Sequence[torch.Tensor], peer: int, tag: int, on_done: Callable[[], None] = ignore
    ) -> Transfer:
        """Begin to send `tensors`.

        Args:
            tensors: of any shapes, types and strides, all on one device. They belong to the transfer until it is done
                or abandoned. The list may be empty.
            peer: the receiving rank, one of the transport's ranks.
            tag: a number that the receiver gives too.
            on_done: is called once, from another thread, when the transfer has ended with success or with an error.

        Returns:
            The transfer under way.

        Raises:
            TransferError: an abandoned transfer with that peer is not done yet.
        """

    def recv(self, into: Sequence[torch.Tensor], peer: int, tag: int, on_done: Callable[[], None] = ignore) -> Transfer:
        """Begin to receive into the tensors `into`, which are written in place.

        Args:
            into: tensors of the shapes, types and order of those that the peer sends; views into a pool are allowed.
                Their values are not defined before the transfer is done.
            peer: the sending rank, one of the transport's ranks.
            tag: the number that the sender gives.
            on_done: as for `send`.

        Returns:
            The transfer under way.

        Raises:
            TransferError: an abandoned transfer with that peer is not done yet.
        """
