"""Owns which tensors of a checkpoint an engine loads, and their sizes. It reads no weights."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

from sgl_batch.checkpoint.expert_layout import is_expert_weight
from sgl_batch.checkpoint.files import StoredTensor, read_tensors
from sgl_batch.checkpoint.model_directory import form_of_weights
from sgl_batch.checkpoint.quantised import GroupedBits, find_quantised
from sgl_batch.errors import ConfigError

_FLOATS = ("F64", "F32", "BF16", "F16")
_BIAS_BYTES, _BF16_BYTES = 4, 2
_EXPERT = re.compile(r"\.experts\.")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_SCALE = re.compile(r"scale|zeros|zero_point|g_idx")


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """One tensor of a checkpoint. `grouped`: how its bfloat16 numbers are kept in 4 or 8 bits; None if they are not."""

    name: str
    stored: StoredTensor
    grouped: GroupedBits | None = None

    @property
    def count(self) -> int:
        return prod(self.stored.shape)

    @property
    def is_float(self) -> bool:
        """Whether it is loaded in the number type of the engine."""
        return self.stored.dtype in _FLOATS

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to routed experts: by its name, or because it stacks all experts of a layer."""
        return len(self.stored.shape) == 3 or _EXPERT.search(self.name) is not None

    @property
    def is_streamable(self) -> bool:
        """Whether streamed weights leave it in its file."""
        return is_expert_weight(self.name)

    @property
    def is_stacked(self) -> bool:
        """Whether it is streamable and has all experts of a layer, transposed (expert_layout)."""
        return self.is_streamable and len(self.stored.shape) == 3

    @property
    def num_outputs(self) -> int:
        """The rows of a matrix [outputs, inputs], of all its experts together."""
        return self.count // self.stored.shape[-2 if self.is_stacked else -1]

    @property
    def is_expert_bias(self) -> bool:
        return self.is_expert and self.name.endswith("_bias")

    @property
    def is_parameter(self) -> bool:
        """Whether it holds parameters of the model. Scales of quantised weights are none."""
        return _SCALE.search(self.name.rpartition(".")[2]) is None

    def num_bytes(self, float_bytes: int) -> int:
        """Return its bytes in memory, where a float takes `float_bytes`. Biases of experts are float32."""
        if self.is_expert_bias:
            return self.count * _BIAS_BYTES
        if self.grouped is not None and float_bytes == _BF16_BYTES:
            return self.grouped.num_bytes(self.count)
        return self.count * float_bytes if self.is_float else self.stored.num_bytes


def tensors_of(directory: Path, num_layers: int, *, cpu_weights: str | None) -> list[ModelTensor]:
    """Return the tensors that an engine loads of a model of `num_layers` layers.

    `cpu_weights`: the number type of weights as --cpu-weight-dtype has it; None where a GPU computes. A CPU has the
    matrices of quantised checkpoints as floats.

    Raises ConfigError where there are no headers.
    """
    stored = read_tensors(directory)
    form = form_of_weights(str(directory)) if cpu_weights is not None else None
    grouped: dict[str, GroupedBits] = {}
    if form is not None:
        quantised = find_quantised(stored, form)
        stored = quantised.as_floats(stored)
        grouped = quantised.grouped if cpu_weights == "auto" else grouped
    if not stored:
        raise ConfigError(
            f"{directory} has no *.safetensors, whose headers give the size of a model; convert the weights, or "
            "fetch the model's safetensors"
        )
    tensors = [ModelTensor(name, one, grouped.get(name)) for name, one in stored.items()]
    return [tensor for tensor in tensors if _is_loaded(tensor.name, num_layers)]


def _is_loaded(name: str, num_layers: int) -> bool:
    """Return whether a tensor is loaded. Layers after the last and `mtp` are drafts; frequencies are computed anew."""
    layer = _LAYER.search(name)
    behind = layer is not None and num_layers and int(layer.group(1)) >= num_layers
    return not (behind or name.startswith("mtp.") or name.endswith("inv_freq"))
