"""Owns where experts lie whose matrices are numbers of 4 bits in their files. It reads headers, and inputs' order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sgl_batch.checkpoint.files import StoredTensor
from sgl_batch.checkpoint.quantised import MXFP4_BLOCK, Kind, QuantisedMatrix, QuantisedTensors
from sgl_batch.core.quantised_form import QuantisedForm
from sgl_batch.errors import ConfigError
from sgl_batch.weights.small_tensors import read_small_tensors

_BITS = 4
# The names of the loader's layouts (sgl_batch_kernel/expert_loader).
_MXFP4 = "MXFP4"
_LAYOUTS = {Kind.PACKED: "ROWS", Kind.GPTQ: "GPTQ", Kind.AWQ: "AWQ", Kind.MXFP4: _MXFP4}
_SCALES = {"BF16": True, "F16": False}
_ZEROS = (".qzeros", ".weight_zero_point")
# For each input its group, where inputs are reordered, and for most that are not.
_ORDERS = (".g_idx", ".weight_g_idx")


@dataclass(frozen=True, slots=True, kw_only=True)
class FourBitNumbers:
    """How matrices of numbers of 4 bits are stored: integers, or mxfp4.

    Attributes:
        layout: The name of the loader's layout.
        group: How many inputs share a scale and a zero point; 0 for all of an output's.
        bf16_scales: Whether scales are bfloat16; otherwise they are float16, and of mxfp4 powers of two.
        has_zeros: Whether there are zero points; otherwise all are 8.
        zero_lack: What is added to stored zero points.
    """

    layout: str
    group: int
    bf16_scales: bool
    has_zeros: bool
    zero_lack: int = 0

    @property
    def are_mxfp4(self) -> bool:
        """Whether they are no integers."""
        return self.layout == _MXFP4

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a matrix in its files: of numbers, scales and zero points."""
        groups = outputs * (1 if self.group == 0 else inputs // self.group)
        scales = groups if self.are_mxfp4 else 2 * groups
        return outputs * inputs // 2 + scales + (groups // 2 if self.has_zeros else 0)


def find_four_bits(
    quantised: QuantisedTensors, names: Sequence[tuple[str, int]], files: Mapping[Path, int]
) -> tuple[FourBitNumbers, torch.Tensor]:
    """Return how all of these matrices are stored, and where: int64 [matrices, 6].

    These are file and byte of numbers, of scales and of zero points; of zero points where there are none, of scales.
    `names`: those of matrices, each with the number of the expert, whose part of a matrix of all experts is meant.
    `files`: the number of each. Raises ConfigError for matrices that differ, or have no such form.
    """
    if floats := [name for name, _ in names if name not in quantised.matrices]:
        raise ConfigError(
            f"{floats[0]} is not quantised, as others are; streamed weights are all alike: use --weights resident"
        )
    matrices = [quantised.matrices[name] for name, _ in names]
    whole = all(one.kind is not Kind.MXFP4 and one.num_groups == 1 for one in matrices)
    kinds = {_stored(one, quantised.form, whole=whole) for one in matrices}
    if len(kinds) > 1:
        raise ConfigError(
            f"experts' matrices are stored in {len(kinds)} forms; streamed weights are all alike: use --weights "
            "resident"
        )
    _check_order(matrices)
    places = []
    for one, (_, expert) in zip(matrices, names, strict=True):
        parts = next(iter(one.parts.values())), one.scales, _part(one, _ZEROS) or one.scales
        experts, own = (one.shape[0], expert) if one.kind is Kind.MXFP4 else (1, 0)
        begins = [part.begin + part.num_bytes // experts * own for part in parts]
        places.append(
            [number for part, begin in zip(parts, begins, strict=True) for number in (files[part.file], begin)]
        )
    return kinds.pop(), torch.tensor(places, dtype=torch.int64)


def _stored(matrix: QuantisedMatrix, form: QuantisedForm, *, whole: bool) -> FourBitNumbers:
    """Return how a matrix is stored. `whole`: all matrices have one group for all inputs of an output."""
    scales, zeros = matrix.scales, _part(matrix, _ZEROS)
    if matrix.kind is Kind.MXFP4:
        return FourBitNumbers(layout=_MXFP4, group=MXFP4_BLOCK, bf16_scales=False, has_zeros=False)
    layout = _LAYOUTS.get(matrix.kind)
    packed_zeros = zeros is None or (zeros.dtype == "I32" and zeros.shape != scales.shape)
    if layout is None or matrix.bits != _BITS or scales.dtype not in _SCALES or not packed_zeros:
        raise ConfigError(
            f"{matrix.name} is stored as {matrix.kind} of {matrix.bits} bits with scales of {scales.dtype}; streamed "
            "integers have 4 bits, scales of F16 or BF16 and zero points in words: use --weights resident"
        )
    return FourBitNumbers(
        layout=layout,
        group=0 if whole else matrix.inputs // matrix.num_groups,
        bf16_scales=_SCALES[scales.dtype],
        has_zeros=zeros is not None,
        zero_lack=form.zero_lack,
    )


def _part(matrix: QuantisedMatrix, ends: Sequence[str]) -> StoredTensor | None:
    return next((matrix.parts[end] for end in ends if end in matrix.parts), None)


def _check_order(matrices: Sequence[QuantisedMatrix]) -> None:
    """Raise ConfigError where inputs of a group are not neighbours."""
    ordered = {one.begin + end: (one, one.parts[end]) for one in matrices for end in _ORDERS if end in one.parts}
    for name, order in read_small_tensors({name: part for name, (_, part) in ordered.items()}):
        matrix, _ = ordered[name]
        if not torch.equal(order.long(), torch.arange(matrix.inputs) // (matrix.inputs // matrix.num_groups)):
            raise ConfigError(
                f"{name} puts inputs in another order, which streamed weights do not have: use --weights resident"
            )
