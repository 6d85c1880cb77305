"""Owns which weights of a start are read ahead, and how many: those that the loader will read whole, if memory is free.

Imports take seconds, in which the disk would wait. They need one core, and reading ahead needs little of another. What
a fast disk has, the loader reads past the page cache as quickly, and nothing of it is read ahead.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from sgl_batch.checkpoint.model_directory import cached_directory
from sgl_batch.checkpoint.read_ahead import ReadAhead, weight_files
from sgl_batch.memory.free_memory import free_bytes
from sgl_batch.weights.page_cache import files_to_read_past_it

logger = logging.getLogger(__name__)

# The formats whose loader reads a directory's files from end to end.
_FORMATS = (None, "auto", "safetensors", "pt", "npcache", "gguf")
# What a model, its files and the machine's memory may raise: the loader will say what is wrong.
_UNKNOWN = (ImportError, OSError, ValueError, LookupError)


def weights_ahead(files: Sequence[Path], *, num_ranks: int = 1, free: Callable[[], int] = free_bytes) -> ReadAhead:
    """Return what reads files of weights ahead while it is entered. Never fails: then it reads nothing.

    At most half of the free memory is filled, because the loaded weights take as much again: what is read would
    otherwise leave the page cache before it is loaded.

    Args:
        files: As `resident_files` returns them.
        num_ranks: Of the engine. Several ranks of a machine have what they read in the page cache, whatever the disk.
        free: Returns the bytes of free memory.
    """
    try:
        return ReadAhead(files, free() // 2 if files else 0, to_read=_of_slow_disk if num_ranks == 1 else list)
    except _UNKNOWN as error:
        logger.debug("weights are not read ahead: %s", error)
        return ReadAhead([], 0)


def resident_files(
    model: str | None, *, revision: str | None = None, load_format: object = None, weights: str
) -> list[Path]:
    """Return the files that the loader will read whole; none where it will not, or where they are not found.

    Args:
        model: A directory, a .gguf file, or a name on the hub, whose files are found if they are in the local cache.
        revision: Of a name on the hub.
        load_format: As SGLang's --load-format.
        weights: As --weights. Streamed experts are read past the page cache, when they are needed.
    """
    if model is None or weights != "resident" or load_format not in _FORMATS:
        return []
    try:
        path = Path(model) if os.path.exists(model) else cached_directory(model, revision)
        return [] if path is None else weight_files(path)
    except _UNKNOWN as error:
        logger.debug("the model's files are not known ahead: %s", error)
        return []


def _of_slow_disk(files: Sequence[Path]) -> list[Path]:
    """Return the files that a loader of one rank will not read past the page cache."""
    past_it = files_to_read_past_it([file for file in files if file.suffix == ".safetensors"])
    return [file for file in files if file not in past_it]
