"""Owns the contract of a control channel between ranks. How messages travel is the implementation's affair."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, TypeVar

M = TypeVar("M")


class Channel(Protocol[M]):
    """Typed messages from rank to rank; those of one peer arrive in the order in which it sent them.

    Of one thread, but for `wake`.
    """

    @property
    def rank(self) -> int:
        """This process's own rank."""

    def send(self, peer: int, message: M) -> None:
        """Hand `message` over for `peer`. That it is on its way says nothing about its arrival.

        Raises PeerTimeout when the peer takes nothing in, PeerLost when it is gone.
        """

    def recv(self, peers: Collection[int], *, timeout_s: float, awaiting: str) -> tuple[int, M] | None:
        """The next message of any of `peers`, with its sender; None after `wake`.

        Raises PeerTimeout after `timeout_s`; PeerLost when one of `peers` is gone and all that it sent has been
        handed out; BadMessage in place of a message that cannot be understood. The first two name what was awaited.
        After PeerLost nothing of that rank is handed out any more.
        """

    def wake(self) -> None:
        """End the `recv` that is waiting, or the next one. From any thread."""
