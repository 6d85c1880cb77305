"""Owns how a checkpoint stores the routed experts that can be read one by one: names, shapes and byte offsets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sgl_batch.checkpoint.files import StoredTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMatrix:
    """A matrix of one expert. It begins at byte `begin` of `file`. `shape`: [outputs, inputs]."""

    file: Path
    begin: int
    shape: tuple[int, int]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayout:
    """Where a checkpoint has the gate, up and down matrices of an expert.

    Attributes:
        gate, up, down: Names of tensors after that of the layer's module of experts. `{expert}` is the expert's number.
        stacked: False: each tensor is one matrix [outputs, inputs]. True: each tensor has all experts of a layer, one
            after the other and transposed, [experts, inputs, outputs]. Gate and up are then one tensor, in which their
            columns alternate: the first number of up follows the first number of gate.
    """

    gate: str
    up: str
    down: str
    stacked: bool = False

    def tensor_names(self, module: str, expert: int) -> tuple[str, str, str]:
        """Return the names of the tensors with an expert's gate, up and down matrices."""
        gate, up, down = (f"{module}.{name.format(expert=expert)}" for name in (self.gate, self.up, self.down))
        return gate, up, down

    def matrices(self, tensors: Mapping[str, StoredTensor], module: str, expert: int) -> list[ExpertMatrix]:
        """Return an expert's gate, up and down matrices; [] if a tensor is missing or has another form."""
        found = [tensors.get(name) for name in self.tensor_names(module, expert)]
        whole = [one for one in found if one is not None and len(one.shape) == (3 if self.stacked else 2)]
        if len(whole) < len(found):
            return []
        return _slices(whole, expert) if self.stacked else [_matrix(one) for one in whole]


def _matrix(tensor: StoredTensor) -> ExpertMatrix:
    outputs, inputs = tensor.shape
    return ExpertMatrix(file=tensor.file, begin=tensor.begin, shape=(outputs, inputs), dtype=tensor.dtype)


def _slices(tensors: list[StoredTensor], expert: int) -> list[ExpertMatrix]:
    """Return the matrices of one expert of stacked gate, up and down tensors; [] if they have not so many experts."""
    made = []
    for tensor, columns, first in zip(tensors, (2, 2, 1), (0, 1, 0), strict=True):
        experts, inputs, width = tensor.shape
        if expert >= experts or width % columns:
            return []
        expert_bytes = tensor.num_bytes // experts
        begin = tensor.begin + expert * expert_bytes + first * (expert_bytes // (inputs * width))
        shape = (width // columns, inputs)
        made.append(ExpertMatrix(file=tensor.file, begin=begin, shape=shape, dtype=tensor.dtype))
    return made


# Qwen3-MoE, DeepSeek and most others; Mixtral and MiniMax-M2; gpt-oss.
LAYOUTS = (
    ExpertLayout(gate="{expert}.gate_proj.weight", up="{expert}.up_proj.weight", down="{expert}.down_proj.weight"),
    ExpertLayout(gate="{expert}.w1.weight", up="{expert}.w3.weight", down="{expert}.w2.weight"),
    ExpertLayout(gate="gate_up_proj", up="gate_up_proj", down="down_proj", stacked=True),
)
_NAMES = {name for layout in LAYOUTS for name in (layout.gate, layout.up, layout.down)}
_ONE = "|".join(re.escape(name).replace(re.escape("{expert}"), r"\d+") for name in sorted(_NAMES))
_EXPERT = re.compile(rf"\.experts\.(?:{_ONE})$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_NUMBER = re.compile(r"\.experts\.(\d+)\.")


def is_expert_weight(name: str) -> bool:
    """Return whether a tensor of a checkpoint has matrices of routed experts. Their biases are other tensors."""
    return _EXPERT.search(name) is not None


def layer_number(name: str) -> int | None:
    """Return the number of the layer in the name of a tensor or of a parameter; None where it names none."""
    found = _LAYER.search(name)
    return None if found is None else int(found[1])


def expert_number(name: str) -> int | None:
    """Return the number of the routed expert whose matrix a tensor is; None for one of all experts, and for others."""
    found = _NUMBER.search(name)
    return int(found[1]) if found is not None and is_expert_weight(name) else None
