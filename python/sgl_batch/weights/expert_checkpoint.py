"""Owns where the experts of a model lie in the files of its checkpoint. It reads only the files' headers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sgl_batch.checkpoint.files import read_header
from sgl_batch.errors import ConfigError

# Gate, up and down: the names of Qwen3-MoE, DeepSeek and most others, and those of Mixtral.
_CONVENTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_EXPERT = re.compile(r"\.experts\.\d+\.(?:gate_proj|up_proj|down_proj|w[123])\.weight$")
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


def is_expert_weight(name: str) -> bool:
    """Whether a tensor of a checkpoint is a matrix of one routed expert."""
    return _EXPERT.search(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLocations:
    """Where each expert's gate, up and down matrices lie in `files`.

    `file_offsets` [L, E, 3, 2], int64: the number of the file, and the matrix's first byte in it. The matrices are
    plain [I, M], [I, M] and [M, I], of `dtype`; M is `hidden`, I is `inter`.
    """

    files: list[str]
    file_offsets: torch.Tensor
    dtype: torch.dtype
    hidden: int
    inter: int

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in the files."""
        return 3 * self.hidden * self.inter * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Tensor:
    file: int
    offset: int
    shape: tuple[int, ...]
    dtype: str


def find_experts(files: Sequence[str], modules: Sequence[str], experts: range) -> ExpertLocations:
    """Find `experts` in each module that holds a layer's experts, such as `model.layers.0.mlp.experts`.

    Raises ConfigError if one is missing, has another shape than the others, or is neither bf16 nor float32.
    """
    found: dict[str, _Tensor] = {}
    for number, file in enumerate(files):
        found |= _expert_tensors(number, Path(file))
    first = _matrices(found, modules[0], experts[0], files)
    inter, hidden = first[0].shape
    shapes = ((inter, hidden), (inter, hidden), (hidden, inter))
    file_offsets = torch.empty(len(modules), len(experts), 3, 2, dtype=torch.int64)
    for layer, module in enumerate(modules):
        for index, expert in enumerate(experts):
            matrices = _matrices(found, module, expert, files)
            for part, (matrix, shape) in enumerate(zip(matrices, shapes, strict=True)):
                if matrix.shape != shape or matrix.dtype != first[0].dtype:
                    raise ConfigError(
                        f"expert {expert} of {module} has a matrix of {matrix.dtype}{list(matrix.shape)}; streamed "
                        f"weights are all alike, here {first[0].dtype}{list(shape)}: use --weights resident"
                    )
                file_offsets[layer, index, part, 0], file_offsets[layer, index, part, 1] = matrix.file, matrix.offset
    if first[0].dtype not in _DTYPES:
        raise ConfigError(
            f"the experts' weights are {first[0].dtype} in {Path(files[0]).parent}; streamed weights are bf16 or "
            "float32: convert the checkpoint, or use --weights resident"
        )
    return ExpertLocations(
        files=list(files), file_offsets=file_offsets, dtype=_DTYPES[first[0].dtype], hidden=hidden, inter=inter
    )


def _matrices(found: dict[str, _Tensor], module: str, expert: int, files: Sequence[str]) -> list[_Tensor]:
    for names in _CONVENTIONS:
        tensors = [found.get(f"{module}.{expert}.{name}.weight") for name in names]
        whole = [tensor for tensor in tensors if tensor is not None and len(tensor.shape) == 2]
        if len(whole) == len(names):
            return whole
    where = Path(files[0]).parent if files else "a checkpoint without safetensors files"
    raise ConfigError(
        f"{module}.{expert}.gate_proj.weight (or w1) and its two companions are not in {where}; streamed weights are "
        "read from safetensors files with a matrix of their own for each expert: use --weights resident"
    )


def _expert_tensors(number: int, file: Path) -> dict[str, _Tensor]:
    return {
        name: _Tensor(number, one.begin, one.shape, one.dtype)
        for name, one in read_header(file).items()
        if is_expert_weight(name)
    }
