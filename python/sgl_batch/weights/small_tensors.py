"""Owns reading small tensors of a checkpoint, such as scales, with little of what lies between them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from sgl_batch.checkpoint.files import StoredTensor
from sgl_batch.errors import ConfigError
from sgl_batch.weights.dtypes import DTYPES

# What lies between two tensors is read with them if it is less: a disk takes longer for a second read.
_GAP_BYTES = 16 << 10
_MOST_BYTES = 1 << 20
# These wait for the disk.
_THREADS = 8

Named = tuple[str, StoredTensor]


def read_small_tensors(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors, file by file, as they lie there.

    Raises ConfigError where a file cannot be read, or is shorter than its header says.
    """
    places = sorted(tensors.items(), key=lambda one: (str(one[1].file), one[1].begin))
    with ExitStack() as opened, ThreadPoolExecutor(_THREADS, thread_name_prefix="small") as readers:
        descriptors: dict[Path, int] = {}
        for _, one in places:
            if one.file not in descriptors:
                descriptors[one.file] = descriptor = _open(one.file)
                opened.callback(os.close, descriptor)
        runs = list(_runs(places))
        for run, read in zip(runs, readers.map(lambda run: _read(descriptors[run[0][1].file], run), runs), strict=True):
            begin = run[0][1].begin
            for name, one in run:
                # A copy, which is aligned and keeps nothing else in memory.
                numbers = torch.empty(one.shape, dtype=DTYPES[one.dtype])
                if one.num_bytes:
                    own = torch.frombuffer(read, dtype=torch.uint8, offset=one.begin - begin, count=one.num_bytes)
                    numbers.view(-1).view(torch.uint8).copy_(own)
                yield name, numbers


def _open(file: Path) -> int:
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"cannot read the weights {file}: {error.strerror}") from error
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # reads nothing ahead
    return descriptor


def _runs(places: Sequence[Named]) -> Iterator[list[Named]]:
    """Yield tensors that are read at once."""
    run: list[Named] = []
    for name, one in places:
        if run:
            first, last = run[0][1], run[-1][1]
            is_near = one.begin - (last.begin + last.num_bytes) <= _GAP_BYTES
            if one.file != first.file or not is_near or one.begin + one.num_bytes - first.begin > _MOST_BYTES:
                yield run
                run = []
        run.append((name, one))
    if run:
        yield run


def _read(descriptor: int, run: Sequence[Named]) -> bytearray:
    first, last = run[0][1], run[-1][1]
    found = bytearray(last.begin + last.num_bytes - first.begin)
    done, view = 0, memoryview(found)
    while done < len(found):
        try:
            got = os.preadv(descriptor, [view[done:]], first.begin + done)
        except OSError as error:
            raise ConfigError(f"cannot read the weights {first.file}: {error.strerror}") from error
        if got == 0:
            raise ConfigError(
                f"the weights {first.file} end before byte {first.begin + len(found):,}, and by their header they do "
                "not: something has cut the file short; fetch it again"
            )
        done += got
    return found
