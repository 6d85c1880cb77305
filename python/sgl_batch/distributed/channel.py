"""Owns the contract of a control channel between ranks. An implementation decides how messages travel."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, TypeVar

M = TypeVar("M")


class Channel(Protocol[M]):
    """Sends typed messages from rank to rank.

    Messages of one peer arrive in the order in which it sent them. The order between two peers is not defined.
    One thread calls all methods, except `wake`, which any thread may call.
    """

    @property
    def rank(self) -> int:
        """This process's own rank."""

    def send(self, peer: int, message: M) -> None:
        """Hand `message` over for delivery to `peer`. The return says nothing about its arrival.

        Args:
            peer: a connected rank, not this one.
            message: is encoded before this returns; the caller may change it afterwards.

        Raises:
            PeerTimeout: the peer took nothing in for as long as the implementation allows. It may be alive.
            PeerLost: the peer's end of the connection is gone. It never comes back.
        """

    def recv(self, peers: Collection[int], *, timeout_s: float, awaiting: str) -> tuple[int, M] | None:
        """Wait for the next message of any of `peers`. Messages of other peers are kept for later calls.

        Args:
            peers: connected ranks, at least one.
            timeout_s: how long to wait at most, in seconds.
            awaiting: what the caller waits for, as PeerTimeout and PeerLost put it: "waited 2 s for {awaiting}".

        Returns:
            The sender's rank and its message, or None after `wake`.

        Raises:
            PeerTimeout: no message came within `timeout_s`. The peers may be alive.
            PeerLost: one of `peers` is gone, and all messages that it sent have been returned. No later call returns a
                message of that rank.
            BadMessage: a message arrived that cannot be decoded, follows a gap, or has an unknown sender (`rank` is
                None then). It is dropped, and the channel goes on.
        """

    def wake(self) -> None:
        """Make the `recv` that waits now return None, or the next one where none waits. Any thread may call this."""
