"""Owns the contract of sending rows to one rank at a time. The caller decides which rows go where, and when.

It is for ranks that do not all step together, unlike the collective `TokenDispatcher`: expert ranks compute the rows
that have arrived, attention ranks continue with another group meanwhile. Peers are global ranks; `core.topology` says
which of them hold a shard.

Shape suffixes: R rows, K experts per token, M hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of one message, at least one: tokens for a layer's experts, or sums for a layer's tokens.

    x_RM: tokens in the model's number type, or sums in float32. ids_RK: int32, the receiver's local expert ids, -1 for
    none. weights_RK: float32. K is 0 for sums, which are in the order in which their tokens were sent.
    """

    layer: int
    x_RM: torch.Tensor
    ids_RK: torch.Tensor
    weights_RK: torch.Tensor


class SendHandle(Protocol):
    """One send under way. The caller does not write to the sent tensors until it is done."""

    @property
    def done(self) -> bool:
        """Whether it has ended, successfully or with an error that `wait` raises."""

    def wait(self, timeout_s: float) -> None:
        """Return when the tensors are free; receive messages meanwhile. Raises TransferError, PeerTimeout."""


class PointToPoint(Protocol):
    """One rank's end, used by one thread. Messages from one rank to another arrive in the order of sending.

    A header is sent before the data. The receiver allocates the tensors, which are the caller's. No call waits for
    another rank to call `receive`: a call that waits accepts incoming messages, so that ranks that all send at once
    make progress. Messages stay in the receiver's memory until `receive` returns them; the callers bound their number.
    """

    def send(self, target: int, rows: Rows) -> SendHandle:
        """Begin to send; wait first while the most sends allowed to that rank are in flight. Raises TransferError."""

    def receive(self, timeout_s: float) -> tuple[int, Rows]:
        """Return the next message that has arrived completely, and its source.

        Raises TransferError, PeerTimeout, PeerLost.
        """
