"""Owns the scales of experts whose matrices lie in their files as bytes: fp8, or integers. It reads scales alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from sgl_batch.checkpoint.files import StoredTensor
from sgl_batch.core.quantised_form import QuantisedForm
from sgl_batch.errors import ConfigError
from sgl_batch.weights.small_tensors import read_small_tensors

_ENDS = (".weight_scale_inv", ".weight_scale")
# A scale's numbers are normal floats, and it is in the kernels' words (sgl-kernel/csrc/cpu/fp8.h).
_LEAST, _LARGEST = 2.0**-100, 2.0**7
# Stands for all rows or columns of a matrix.
_ALL = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredScales:
    """The scales of matrices of bytes.

    Attributes:
        values: Those of one matrix after the other, float32 [any]; of a matrix by rows of blocks.
        firsts: Where each matrix's begin, int64 [matrices].
        block: How many rows and columns share a scale; 0 for all of them.
    """

    values: torch.Tensor
    firsts: torch.Tensor
    block: tuple[int, int]


def read_scales(tensors: Mapping[str, StoredTensor], names: Sequence[str], form: QuantisedForm) -> StoredScales:
    """Read the scales of the matrices of these `names`, all with blocks of one size.

    `tensors`: those of the checkpoint's headers. Raises ConfigError for scales that are missing or differ in kind, and
    for those that no weight has.
    """
    scales = [_scale_of(tensors, name) for name in names]
    blocks = {
        _block(tensors[name].shape, tensors[scale].shape, form.block) for name, scale in zip(names, scales, strict=True)
    }
    if len(blocks) > 1:
        raise ConfigError(
            f"experts' matrices have scales for blocks of {sorted(blocks)}; streamed weights are all alike: use "
            "--weights resident"
        )
    sizes = torch.tensor([prod(tensors[scale].shape) for scale in scales])
    firsts = sizes.cumsum(0) - sizes
    read = dict(read_small_tensors({scale: tensors[scale] for scale in scales}))
    values = torch.cat([read[scale].flatten().float() for scale in scales])
    in_words = (values == 0) | ((values >= _LEAST) & (values <= _LARGEST))
    if not bool(in_words.all()):
        wrong = int((~in_words).nonzero()[0])
        name = scales[int((firsts <= wrong).nonzero()[-1])]
        raise ConfigError(
            f"{name} has a scale of {float(values[wrong]):g}, and streamed weights take 0 and {_LEAST:g} to "
            f"{_LARGEST:g}: fetch the checkpoint anew, or use --weights resident"
        )
    return StoredScales(values=values, firsts=firsts, block=blocks.pop())


def _scale_of(tensors: Mapping[str, StoredTensor], name: str) -> str:
    begin = name.removesuffix(".weight")
    found = [begin + end for end in _ENDS if begin + end in tensors]
    if len(found) != 1 or begin + ".weight_zero_point" in tensors:
        raise ConfigError(
            f"{name} is of 8 bits and has {len(found)} tensors of scales; streamed weights have one, and no zero "
            "points: fetch the checkpoint anew, or use --weights resident"
        )
    return found[0]


def _block(shape: Sequence[int], scales: Sequence[int], block: tuple[int, int] | None) -> tuple[int, int]:
    """Return how many rows and columns of a matrix share a scale; 0 for all. A single block counts as one of many."""
    if block is not None and tuple(scales) == tuple(-(-size // own) for size, own in zip(shape, block, strict=True)):
        return block
    return (_ALL, _ALL) if prod(scales) == 1 else (1, _ALL)
