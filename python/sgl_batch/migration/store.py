"""Owns the contract of a rank's store of sequences. Its callers decide which sequences move, and who owns them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sgl_batch.migration.header import SequenceHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A sequence as the sender offers it.

    `tensors`: its KV as views into the store's memory, in the order, shapes and type that the header gives
    (`SequenceHeader.tensor_shapes`); empty where no page is sent. They stay valid until `release`.
    """

    header: SequenceHeader
    tensors: Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Pages that the receiver keeps for a sequence that may arrive.

    `tensors`: views to receive into, in the order of `Export.tensors`. They belong to the transfer until `adopt` or
    `cancel`.
    """

    tensors: Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why the receiver has no room for a sequence, with the numbers."""

    reason: str


class SequenceStore(Protocol):
    """The sequences and pages of one rank, as migration uses them.

    A sequence that moves does not run: from `export` to `release`, or to the end of a migration that fails, only these
    calls change it and its pages. One thread makes all calls.

        sender:     export -> (nothing, if it stays) | release
        receiver:   reserve -> adopt | cancel
    """

    def export(self, sequence_id: str) -> Export:
        """Return a sequence for an offer. It stays in the store, whole, until `release`.

        Args:
            sequence_id: a sequence of this rank.

        Returns:
            Its header, and views of its KV. A sequence that is not released continues as if this had not been called.
        """

    def reserve(self, header: SequenceHeader) -> Reservation | Refusal:
        """Reserve everything that adopting a sequence takes: its pages, and room for it in all tables.

        Args:
            header: the sequence as its sender exported it.

        Returns:
            The reservation, which the caller ends with exactly one call of `adopt` or `cancel`; or a refusal, after
            which nothing is reserved. Lack of room is no error.
        """

    def adopt(self, header: SequenceHeader, reservation: Reservation) -> None:
        """Take over a sequence: it belongs to this rank from now on, with the KV in the reserved pages.

        The caller has received all tensors. This must not fail, because the sender frees its pages next: `reserve` has
        reserved everything that it takes.

        Args:
            header: the header that was given to `reserve`.
            reservation: what `reserve` returned for it. It is used up.
        """

    def cancel(self, header: SequenceHeader, reservation: Reservation) -> None:
        """End a reservation whose sequence does not arrive. Its pages are free again, whatever they contain.

        No transfer writes to the pages any more: the caller has begun none, or has abandoned it.

        Args:
            header: the header that was given to `reserve`.
            reservation: what `reserve` returned for it. It is used up.
        """

    def release(self, sequence_id: str) -> None:
        """Forget a sequence that belongs to another rank now, and free its pages.

        No transfer reads the pages any more: it is done, or the caller has abandoned it.

        Args:
            sequence_id: a sequence that was exported.
        """


def layout_fault(header: SequenceHeader, tensors: Sequence[torch.Tensor]) -> str | None:
    """Return how the tensors differ from what the header says, or None.

    Both ranks check this before any byte is sent: a transport cannot recover from a receiver that expects other sizes.
    """
    if len(tensors) != header.num_tensors:
        return f"{len(tensors)} tensors where its header says {header.num_tensors}"
    for index, (tensor, shape) in enumerate(zip(tensors, header.tensor_shapes(), strict=True)):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != tuple(shape) or dtype != header.page_dtype:
            return (
                f"tensor {index} is {dtype} {tuple(tensor.shape)} where its header says {header.page_dtype} "
                f"{tuple(shape)}; ranks that exchange sequences need the same model, page size and KV type"
            )
    return None
