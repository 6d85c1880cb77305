"""Owns the reading of a checkpoint's indexes and headers, and the check that each file is complete.

It reads no tensors, and does not check that they fit the model (`fit` does). A safetensors file has 8 bytes of length,
a JSON header of that length, and then the tensors at the offsets in the header.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

import msgspec

from sgl_batch.errors import ConfigError

_LFS_POINTER = b"version https://git-lfs"
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_PICKLED = ("*.bin", "*.pt", "*.pth")
_ONE_OF = re.compile(r"-(\d{5})-of-(\d{5})\.(?:safetensors|bin)$")
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}


# What msgspec raises for input that is no JSON, has other types, is no text, or is nested too deeply.
NOT_READABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Entry(msgspec.Struct, gc=False):
    """The header's entry of one tensor. The entry of the whole file (`__metadata__`) has none of these fields."""

    dtype: str = ""
    shape: tuple[int, ...] | None = None
    data_offsets: tuple[int, int] | None = None


class _Index(msgspec.Struct):
    """An index: by tensor, the file that has it."""

    weight_map: dict[str, str]


_HEADER = msgspec.json.Decoder(dict[str, _Entry])


class StoredTensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor of a checkpoint: `num_bytes` bytes at offset `begin` of `file`. `dtype`: as safetensors names it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


def read_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all safetensors files, by name. Raises ConfigError for a missing or incomplete file."""
    files = sorted(directory.glob("*.safetensors"))
    headers = {path.name: read_header(path) for path in files}
    for pattern in _PICKLED:
        for path in directory.glob(pattern):
            _check_pickled(path)
    indexes = [directory / name for name in _INDEXES if (directory / name).exists()]
    for index in indexes:
        _check_index(index, headers)
    if not indexes:
        _check_numbers(directory)
    return {name: tensor for header in headers.values() for name, tensor in header.items()}


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file, by name. Raises ConfigError for an unreadable or incomplete file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            begin = file.read(max(8, len(_LFS_POINTER)))
            check_no_pointer(path, begin)
            length = int.from_bytes(begin[:8], "little")
            if len(begin) < 8 or 8 + length > size:
                raise _cut_short(path, size, 8 + length)
            file.seek(8)
            entries = _HEADER.decode(file.read(length))
    except NOT_READABLE as error:
        raise ConfigError(f"{path} is no file of safetensors ({error}); fetch it again") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    entries.pop("__metadata__", None)
    found = {name: _stored(path, name, entry, 8 + length) for name, entry in entries.items()}
    whole = max((one.begin + one.num_bytes for one in found.values()), default=8 + length)
    if size < whole:
        raise _cut_short(path, size, whole)
    return found


def check_no_pointer(path: Path, begin: bytes) -> None:
    """Raise ConfigError for a Git LFS pointer, which Git leaves for a file that it has not fetched.

    `begin`: the first bytes of the file.
    """
    if begin.startswith(_LFS_POINTER):
        raise ConfigError(f"{path} is a pointer of Git LFS, not the file itself; fetch it with `git lfs pull`")


def _cut_short(path: Path, size: int, whole: int) -> ConfigError:
    return ConfigError(
        f"the weights {path} have {size:,} bytes, and by their header {whole:,}: the file was cut short, by an "
        "interrupted download or copy, say; fetch it again"
    )


def _stored(path: Path, name: str, entry: _Entry, data: int) -> StoredTensor:
    shape, (begin, end) = entry.shape, entry.data_offsets or (0, -1)
    if not entry.dtype or shape is None or min(shape, default=0) < 0 or not 0 <= begin <= end:
        raise ConfigError(f"{path} has no valid type, shape and offsets of {name}; fetch the file again")
    item_bytes = _ITEM_BYTES.get(entry.dtype)
    if item_bytes is not None and end - begin != prod(shape) * item_bytes:
        raise ConfigError(
            f"{path} has {end - begin:,} bytes of {name}, which {entry.dtype}{list(shape)} does not take; "
            "fetch the file again"
        )
    return StoredTensor(path, entry.dtype, shape, data + begin, end - begin)


def _check_pickled(path: Path) -> None:
    """Raise ConfigError for an incomplete file of torch.save, an archive with its directory at the end."""
    with path.open("rb") as file:
        begin = file.read(len(_LFS_POINTER))
    check_no_pointer(path, begin)
    if not begin or (begin.startswith(b"PK") and not zipfile.is_zipfile(path)):
        raise ConfigError(
            f"the weights {path} have {path.stat().st_size:,} bytes, and no end: the file was cut short, by an "
            "interrupted download or copy, say; fetch it again"
        )


def _check_index(index: Path, headers: Mapping[str, Mapping[str, StoredTensor]]) -> None:
    try:
        file_of = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except NOT_READABLE as error:
        raise ConfigError(f"{index} is no index of weights ({error}); fetch it again") from error
    named = sorted(set(file_of.values()))
    missing = [name for name in named if not (index.parent / name).exists()]
    if missing:
        raise ConfigError(
            f"{index} names {len(named)} files of weights, of which {len(missing)} are missing ({missing[0]}, say); "
            "fetch them"
        )
    absent = [name for name, file in file_of.items() if file in headers and name not in headers[file]]
    if absent:
        raise ConfigError(
            f"{index} names {len(absent)} tensors that their files do not have ({absent[0]}, say, in "
            f"{file_of[absent[0]]}): the files are of two checkpoints; fetch all of one again"
        )


def _check_numbers(directory: Path) -> None:
    """Raise ConfigError if files are missing whose names count them (`-00001-of-00004`), without an index."""
    found: dict[int, set[int]] = {}
    for path in directory.iterdir():
        if numbers := _ONE_OF.search(path.name):
            found.setdefault(int(numbers[2]), set()).add(int(numbers[1]))
    for count, present in found.items():
        if absent := sorted(set(range(1, count + 1)) - present):
            raise ConfigError(
                f"{directory} has {len(present)} of {count} files of weights: {few(map(str, absent))} are missing; "
                "fetch them"
            )


def few(names: Iterable[str], most: int = 6) -> str:
    """Return the first names as text, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
