"""Owns the contract of what holds sequences on a rank. Which of them move, and who owns them, is decided elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sgl_batch.migration.header import SequenceHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A sequence as it is offered: its state, and its KV as views in the order of `SequenceHeader.tensor_shapes`."""

    header: SequenceHeader
    tensors: Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Pages kept free for a sequence that may come: views to receive into, ordered as in Export."""

    tensors: Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a sequence has no place here, with the numbers."""

    reason: str


class SequenceStore(Protocol):
    """A rank's sequences and pages. A sequence on the move does not run: only these calls change it and its pages."""

    def export(self, sequence_id: str) -> Export:
        """The sequence as it stands. It stays here, whole, until `release`."""

    def reserve(self, header: SequenceHeader) -> Reservation | Refusal:
        """Pages, and all else that adopting the sequence takes, or why not. Ended by `adopt` or `cancel`."""

    def adopt(self, header: SequenceHeader, reservation: Reservation) -> None:
        """The KV is in the reserved pages and the sequence belongs here. Must not fail: all was reserved."""

    def cancel(self, header: SequenceHeader, reservation: Reservation) -> None:
        """The sequence does not come: the reserved pages are free again, with anything in them."""

    def release(self, sequence_id: str) -> None:
        """The sequence belongs to another rank: forget it and free its pages."""


def layout_fault(header: SequenceHeader, tensors: Sequence[torch.Tensor]) -> str | None:
    """In what the tensors differ from what the header says; None if in nothing.

    Both ranks check before any byte travels: a transport cannot recover from a receiver that expects other sizes.
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
