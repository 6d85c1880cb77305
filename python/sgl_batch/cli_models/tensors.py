"""Owns what the headers of a model's safetensors files say: names, shapes and number types. It reads no weight."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from sgl_batch.errors import ConfigError

# Bytes of a number; formats with several numbers in one element are of their element's size.
ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
_FLOATS = ("F64", "F32", "BF16", "F16")
_EXPERT = re.compile(r"\.experts\.")
# One matrix of one expert, as streamed weights are read.
_STREAMABLE = re.compile(r"\.experts\.\d+\.\w+\.weight$")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_SCALE = re.compile(r"scale|zeros|zero_point|g_idx")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint. `dtype`: as safetensors calls it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether it is loaded in the number type of the engine."""
        return self.dtype in _FLOATS

    @property
    def is_expert(self) -> bool:
        return _EXPERT.search(self.name) is not None

    @property
    def is_streamable(self) -> bool:
        return _STREAMABLE.search(self.name) is not None

    @property
    def is_parameter(self) -> bool:
        """Whether its numbers are the model's own; scales of quantised ones are not."""
        return _SCALE.search(self.name.rpartition(".")[2]) is None

    def num_bytes(self, float_bytes: int) -> int:
        """In memory, where floats take `float_bytes` each."""
        return self.count * (float_bytes if self.is_float else ITEM_BYTES.get(self.dtype, 1))


def read_tensors(directory: Path, num_layers: int) -> list[Tensor]:
    """The tensors that an engine loads of a model of so many layers. Raises ConfigError where there are no headers."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{directory} has no *.safetensors, of which headers say how large a model is; convert the weights, or "
            "fetch the model's safetensors"
        )
    return [tensor for file in files for tensor in _header(file) if _is_loaded(tensor, num_layers)]


def _header(file: Path) -> Iterable[Tensor]:
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    for name, told in header.items():
        if name != "__metadata__":
            yield Tensor(name, told["dtype"], tuple(told["shape"]))


def _is_loaded(tensor: Tensor, num_layers: int) -> bool:
    """Layers behind the last one, and `mtp`, are for speculative decoding; frequencies are computed anew."""
    layer = _LAYER.search(tensor.name)
    behind = layer is not None and num_layers and int(layer.group(1)) >= num_layers
    return not (behind or tensor.name.startswith("mtp.") or tensor.name.endswith("inv_freq"))
