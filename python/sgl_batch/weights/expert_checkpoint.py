"""Owns finding a model's experts in the files of its checkpoint. It reads only the files' headers, and scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sgl_batch.checkpoint.expert_layout import LAYOUTS, ExpertLayout, ExpertMatrix, is_expert_weight
from sgl_batch.checkpoint.files import StoredTensor, read_header
from sgl_batch.checkpoint.quantised import find_quantised
from sgl_batch.core.quantised_form import QuantisedForm
from sgl_batch.errors import ConfigError
from sgl_batch.weights.four_bit_numbers import FourBitNumbers, find_four_bits
from sgl_batch.weights.stored_scales import StoredScales, read_scales

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
# Of numbers that share scales.
_BYTES = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLocations:
    """Where each expert's gate, up and down matrices lie in `files`.

    `file_offsets` [L, E, 3, 2], int64: the number of the file, and the matrix's first byte in it. The matrices are
    [I, M], [I, M] and [M, I], of `dtype`; M is `hidden`, I is `inter`. `transposed`: they lie as stacked ones do
    (checkpoint/expert_layout): gate and up in [M, 2I], whose columns alternate, and down as [I, M]. `scales`: those of
    matrices of bytes; file_offsets [L, E, 3, 3] then also say which of them is a matrix's first. `four_bits`: how those
    of 4 bits are stored, in bytes; file_offsets [L, E, 3, 6] then also have places of scales and zero points.
    """

    files: list[str]
    file_offsets: torch.Tensor
    dtype: torch.dtype
    hidden: int
    inter: int
    transposed: bool = False
    scales: StoredScales | None = None
    four_bits: FourBitNumbers | None = None

    @property
    def computed(self) -> torch.dtype:
        """The number type in which the experts compute."""
        return self.dtype if self.scales is None and self.four_bits is None else torch.bfloat16

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in the files; of fp8 and int8 without scales, which are read once."""
        if self.four_bits is not None:
            shapes = 2 * [(self.inter, self.hidden)] + [(self.hidden, self.inter)]
            return sum(self.four_bits.num_bytes(*shape) for shape in shapes)
        return 3 * self.hidden * self.inter * self.dtype.itemsize


def find_experts(
    files: Sequence[str],
    modules: Sequence[str],
    experts: range,
    *,
    stacked: bool = False,
    form: QuantisedForm | None = None,
) -> ExpertLocations:
    """Find `experts` in each module that holds a layer's experts, such as `model.layers.0.mlp.experts`.

    `stacked`: whether the model's checkpoints have all experts of a layer in one tensor (checkpoint/expert_layout).
    `form`: how the checkpoint is quantised.

    Raises ConfigError if one is missing, has another shape than the others, or is neither bf16 nor float32, nor of a
    form in which quantised weights are streamed (core/quantised_form).
    """
    headers: dict[str, StoredTensor] = {}
    for file in files:
        headers |= read_header(Path(file))
    quantised = find_quantised(headers, form) if form is not None and form.in_four_bits else None
    plain = headers if quantised is None else quantised.as_floats(headers)
    found = {name: one for name, one in plain.items() if is_expert_weight(name)}
    numbers = {Path(file): number for number, file in enumerate(files)}
    layout = _layout(found, modules[0], experts[0], files, stacked=stacked)
    first = _matrices(found, modules[0], experts[0], files, layout)
    inter, hidden = first[0].shape
    shapes = ((inter, hidden), (inter, hidden), (hidden, inter))
    file_offsets = torch.empty(len(modules), len(experts), 3, 2, dtype=torch.int64)
    for layer, module in enumerate(modules):
        for index, expert in enumerate(experts):
            matrices = _matrices(found, module, expert, files, layout)
            for part, (matrix, shape) in enumerate(zip(matrices, shapes, strict=True)):
                if matrix.shape != shape or matrix.dtype != first[0].dtype:
                    raise ConfigError(
                        f"expert {expert} of {module} has a matrix of {matrix.dtype}{list(matrix.shape)}; streamed "
                        f"weights are all alike, here {first[0].dtype}{list(shape)}: use --weights resident"
                    )
                file_offsets[layer, index, part, 0] = numbers[matrix.file]
                file_offsets[layer, index, part, 1] = matrix.begin
    scales, four_bits = None, None
    names = [(one, number) for own in modules for number in experts for one in layout.tensor_names(own, number)]
    if quantised is not None and any(name in quantised.matrices for name, _ in names):
        four_bits, places = find_four_bits(quantised, names, numbers)
        file_offsets = places.view(len(modules), len(experts), 3, -1)
    elif first[0].dtype in _BYTES and form is not None and not stacked:
        scales = read_scales(headers, [name for name, _ in names], form)
        file_offsets = torch.cat((file_offsets, scales.firsts.view(len(modules), len(experts), 3, 1)), dim=3)
    elif first[0].dtype not in _DTYPES:
        raise ConfigError(
            f"the experts' weights are {first[0].dtype} in {Path(files[0]).parent}; streamed weights are bf16 or "
            "float32, or on a CPU fp8 (e4m3) or int8 with scales or numbers of 4 bits: convert the checkpoint, or use "
            "--weights resident"
        )
    return ExpertLocations(
        files=list(files),
        file_offsets=file_offsets,
        dtype=torch.uint8 if four_bits is not None else {**_DTYPES, **_BYTES}[first[0].dtype],
        hidden=hidden,
        inter=inter,
        transposed=stacked and four_bits is None,
        scales=scales,
        four_bits=four_bits,
    )


def _layout(
    tensors: Mapping[str, StoredTensor], module: str, expert: int, files: Sequence[str], *, stacked: bool
) -> ExpertLayout:
    """Return the layout in which a checkpoint has an expert; the first that it might have if it has none."""
    layouts = [layout for layout in LAYOUTS if layout.stacked == stacked]
    return next((one for one in layouts if one.matrices(tensors, module, expert)), layouts[0])


def _matrices(
    tensors: Mapping[str, StoredTensor], module: str, expert: int, files: Sequence[str], layout: ExpertLayout
) -> list[ExpertMatrix]:
    found = layout.matrices(tensors, module, expert)
    if found:
        return found
    where = Path(files[0]).parent if files else "a checkpoint without safetensors files"
    gate, _, down = layout.tensor_names(module, expert)
    if layout.stacked:
        raise ConfigError(
            f"{gate} and {down} with an expert {expert} are not in {where}; streamed weights of this model are read "
            "from safetensors files with one tensor [experts, inputs, outputs] for each layer: use --weights resident"
        )
    raise ConfigError(
        f"{gate} (or w1) and its two companions are not in {where}; streamed weights of this model are read from "
        "safetensors files with a matrix of their own for each expert: use --weights resident"
    )
