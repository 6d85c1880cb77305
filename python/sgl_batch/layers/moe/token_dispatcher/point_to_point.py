"""Owns the contract of sending rows to one rank at a time; decides neither which rows go where nor when.

Beside the collective `TokenDispatcher`, for ranks that do not all step together: expert ranks that compute what has
come, attention ranks that go on with another group meanwhile. Peers are global ranks; `core.topology` says which of
them hold a shard.

Shape suffixes: R rows, K experts per token, M hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of one message, at least one: tokens on their way to a layer's experts, or sums on their way back.

    x_RM: tokens in the model's type, or float32 sums. ids_RK: int32, the receiver's local expert ids, -1 for none.
    weights_RK: float32. K is 0 for sums, which return in the order in which their tokens came.
    """

    layer: int
    x_RM: torch.Tensor
    ids_RK: torch.Tensor
    weights_RK: torch.Tensor


class SendHandle(Protocol):
    """One send under way. Until it is done nobody writes the tensors that were sent."""

    @property
    def done(self) -> bool:
        """Whether it has ended, well or with an error that `wait` raises."""

    def wait(self, timeout_s: float) -> None:
        """Return when the tensors are free, and take in what comes meanwhile. Raises TransferError, PeerTimeout."""


class PointToPoint(Protocol):
    """One rank's end, of one thread. Messages of an ordered pair of ranks come in the order in which they were sent.

    A header travels before the data, and the receiver makes the tensors for them: they are the caller's. No call waits
    for another rank to call `receive`: whichever call waits takes in what comes, so that ranks that all send at once do
    not stand still. What has come lies in the receiver's memory until it is received; the callers bound how much.
    """

    def send(self, target: int, rows: Rows) -> SendHandle:
        """Begin to send. Waits while as many sends to that rank as may be in flight are. Raises TransferError."""

    def receive(self, timeout_s: float) -> tuple[int, Rows]:
        """The next message whose data is here whole, with its source. Raises TransferError, PeerTimeout, PeerLost."""
