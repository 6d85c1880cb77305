"""Owns what is known of a weight that is packed for the native kernels: its matrices, and the form of their numbers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from sgl_batch.layers.small_weights import GroupedForm


class Form(Enum):
    """What becomes of a weight's numbers that have no grouped form, or are to have none."""

    PLAIN, INT8, CODED = "plain", "int8", "coded"


@dataclass(slots=True, kw_only=True)
class Packed:
    """A weight whose data are packed, as matrices [B, N, K] of `shape`; int8 matrices have `scales` [B, N].

    Matrices of coded panels have `marks` [B, panels]. `alike`: the weights that are packed in one form, this one among
    them.
    """

    weight: torch.Tensor
    shape: tuple[int, int, int]
    dtype: torch.dtype
    form: Form
    may_be_grouped: bool
    alike: list[Packed]
    scales: torch.Tensor | None = None
    marks: torch.Tensor | None = None
    in_quads: bool = False
    """Whether int8 matrices are packed to meet int8 rows."""
    grouped: GroupedForm | None = None
    """The form of matrices of 4 or 8 bits that share scales, whose data `weight` holds; None for others."""
    reordered: bool = False
    """Whether the rows of each expert's gate and up alternate in the plain order."""

    @property
    def matrices(self) -> torch.Tensor:
        return self.weight.data.view(*self.shape[:2], -1)
