"""Computes a hash that distinguishes model directories without reading all weights."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import BinaryIO

SMALL_FILE_BYTES = 16 << 20
NUM_SAMPLES = 64
SAMPLE_BYTES = 64 << 10
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
_TEXTS = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")

MODEL_HASH_RULE = (
    "sha256 over the directory's files that end in "
    + ", ".join(sorted(_WEIGHTS + _TEXTS))
    + " (subdirectories left out), sorted by name: for each its name, a zero byte, its size as 8 bytes "
    f"little-endian, then the whole content up to {SMALL_FILE_BYTES} bytes; of a larger file the safetensors "
    "header, if it is one, "
    f"and {NUM_SAMPLES} blocks of {SAMPLE_BYTES} bytes at offsets evenly spread from its start to its end"
)


def model_hash(directory: Path) -> str:
    """Return the hash of a local model by MODEL_HASH_RULE, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    files = sorted(path for path in directory.iterdir() if path.suffix in _WEIGHTS + _TEXTS and path.is_file())
    for path in files:
        size = path.stat().st_size
        digest.update(path.name.encode() + b"\0" + struct.pack("<Q", size))
        with path.open("rb") as file:
            if size <= SMALL_FILE_BYTES:
                digest.update(file.read())
            else:
                _hash_large(digest, file, size, is_safetensors=path.suffix == ".safetensors")
    return digest.hexdigest()


def _hash_large(digest: hashlib._Hash, file: BinaryIO, size: int, *, is_safetensors: bool) -> None:
    if is_safetensors:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        digest.update(file.read(min(header_bytes, size)))
    for sample in range(NUM_SAMPLES):
        file.seek((size - SAMPLE_BYTES) * sample // (NUM_SAMPLES - 1))
        digest.update(file.read(SAMPLE_BYTES))
