"""Owns reading small tensors of a checkpoint one by one, such as scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from sgl_batch.checkpoint.files import StoredTensor


def read_small_tensors(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors, file by file, each of which is opened once."""
    by_file: dict[Path, list[str]] = {}
    for name, one in tensors.items():
        by_file.setdefault(one.file, []).append(name)
    for file, names in by_file.items():
        with safe_open(str(file), framework="pt") as opened:
            for name in names:
                yield name, opened.get_tensor(name)
