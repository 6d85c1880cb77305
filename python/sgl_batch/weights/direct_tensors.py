"""Owns reading the tensors of safetensors files past the page cache, a few blocks of memory ahead of their user.

A block is a run of neighbouring tensors of a file, or one large tensor. Its memory is used again when its tensors are
gone, so that it stays small and is new to the kernel only once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sgl_batch.checkpoint.files import StoredTensor, read_header
from sgl_batch.errors import ConfigError
from sgl_batch.memory.huge_buffer import huge_buffer
from sgl_batch.weights.dtypes import DTYPES
from sgl_batch.weights.page_cache import files_to_read_past_it

# Direct reads begin and end at multiples of it, in the file and in memory.
_SECTOR_BYTES = 4096
_BLOCK_BYTES = 16 << 20
_PIECE_BYTES = 16 << 20
_AHEAD_BYTES = 256 << 20
_THREADS = 2

NamedTensor = tuple[str, Tensor]


@dataclass(slots=True)
class _Memory:
    """Memory of blocks, one after the other. `users`: the views of the last one's tensors."""

    whole: memoryview
    users: list[weakref.ref[memoryview]] = field(default_factory=list)

    @property
    def is_free(self) -> bool:
        return all(user() is None for user in self.users)


@dataclass(frozen=True, slots=True)
class _Block:
    """Tensors of a file by name, from byte `begin`, a multiple of a sector, to byte `end`."""

    file: Path
    begin: int
    end: int
    tensors: list[tuple[str, StoredTensor]]

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


def read_past_page_cache(
    files: Sequence[Path], wanted: Callable[[str], bool]
) -> tuple[list[Path], Iterator[NamedTensor]]:
    """Return the files that are better read through the page cache, and the `wanted` tensors of all others.

    The choice is made by `weights.page_cache`. Files with number formats that are not known here are not read, and none
    at all where a later file has a tensor of an earlier one again, which must then be loaded after it.
    """
    headers = {file: read_header(file) for file in files}
    known = [file for file, header in headers.items() if all(one.dtype in DTYPES for one in header.values())]
    is_repeated = len(set().union(*headers.values())) < sum(map(len, headers.values()))
    direct = [] if is_repeated else files_to_read_past_it(known)
    return [file for file in files if file not in direct], direct_tensors(direct, wanted)


def direct_tensors(files: Sequence[Path], wanted: Callable[[str], bool] = lambda _: True) -> Iterator[NamedTensor]:
    """Yield the name and the tensor of each tensor that is `wanted`, file by file, as they lie in it.

    The files are read by threads, at most 256 MiB or one block ahead. A tensor may be kept: then its memory, with that
    of its neighbours in the block, is not used again.

    Raises ConfigError where a file cannot be read, or is shorter than its header says.
    """
    blocks, opened = deque(_blocks(files, wanted)), {}
    coming: deque[tuple[_Block, _Memory, list[Future[None]]]] = deque()
    lent: list[_Memory] = []
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="weights") as readers:
        try:
            while blocks or coming:
                while blocks and _fits(blocks[0], [block for block, _, _ in coming]):
                    block = blocks.popleft()
                    if block.file not in opened:
                        opened[block.file] = _open(block.file)
                    memory, descriptor = _take(lent, block.num_bytes), opened[block.file]
                    pieces = range(0, block.num_bytes, _PIECE_BYTES)
                    reads = [readers.submit(_read, descriptor, block, memory.whole, piece) for piece in pieces]
                    coming.append((block, memory, reads))
                block, memory, reads = coming.popleft()
                for read in reads:
                    read.result()
                lent.append(memory)
                yield from _tensors(block, memory)
        finally:
            readers.shutdown(cancel_futures=True)
            for descriptor in opened.values():
                os.close(descriptor)


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        raise ConfigError(f"cannot read the weights {file} past the page cache: {error.strerror}") from error


def _fits(block: _Block, coming: Sequence[_Block]) -> bool:
    return not coming or sum(one.num_bytes for one in coming) + block.num_bytes <= _AHEAD_BYTES


def _blocks(files: Sequence[Path], wanted: Callable[[str], bool]) -> Iterator[_Block]:
    for file in files:
        tensors: list[tuple[str, StoredTensor]] = []
        begin = end = 0
        for name, tensor in sorted(read_header(file).items(), key=lambda item: item[1].begin):
            if not wanted(name):
                continue
            # What lies between is not wanted, and not read.
            apart = tensor.begin > end + _SECTOR_BYTES
            if tensors and (apart or tensor.begin + tensor.num_bytes - begin > _BLOCK_BYTES):
                yield _Block(file, begin, end, tensors)
                tensors = []
            if not tensors:
                begin = tensor.begin // _SECTOR_BYTES * _SECTOR_BYTES
            tensors.append((name, tensor))
            end = tensor.begin + tensor.num_bytes
        if tensors:
            yield _Block(file, begin, end, tensors)


def _take(lent: list[_Memory], num_bytes: int) -> _Memory:
    """Return memory for a block: some of what was lent and is free, or else new memory.

    Memory of one large tensor goes back to the kernel where a block does not need it.
    """
    needed, usual = -(-num_bytes // _SECTOR_BYTES) * _SECTOR_BYTES, _BLOCK_BYTES + _SECTOR_BYTES
    free = [memory for memory in lent if memory.is_free]
    fitting = [memory for memory in free if len(memory.whole) >= needed]
    found = min(fitting, key=lambda memory: len(memory.whole), default=None)
    for memory in free:
        if memory is found or len(memory.whole) > usual:
            lent.remove(memory)
    if found is None:
        return _Memory(huge_buffer(max(needed, usual)))
    found.users.clear()
    return found


def _read(descriptor: int, block: _Block, memory: memoryview, piece: int) -> None:
    """Read one piece of a block, from byte `piece` of it, to the same byte of the memory."""
    needed = min(_PIECE_BYTES, block.num_bytes - piece)
    whole, done = -(-needed // _SECTOR_BYTES) * _SECTOR_BYTES, 0
    while done < needed:
        reached = done + _read_some(descriptor, block, memory[piece + done : piece + whole], piece + done)
        # A part of a sector is read again with the rest of it, unless the file ends there.
        further = reached if reached >= needed else reached - reached % _SECTOR_BYTES
        if further == done:
            raise ConfigError(
                f"the weights {block.file} have {block.begin + piece + reached:,} bytes, and by their header at least "
                f"{block.end:,}: something has cut the file short; fetch it again"
            )
        done = further


def _read_some(descriptor: int, block: _Block, memory: memoryview, offset: int) -> int:
    try:
        try:
            return os.preadv(descriptor, [memory], block.begin + offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        # What the file system does not read past the page cache is read through it.
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
        return os.preadv(descriptor, [memory], block.begin + offset)
    except OSError as error:
        raise ConfigError(f"cannot read the weights {block.file}: {error.strerror}") from error


def _tensors(block: _Block, memory: _Memory) -> Iterator[NamedTensor]:
    """Yield a block's tensors, each a storage of its own over its part of the memory."""
    for name, stored in block.tensors:
        dtype, begin = DTYPES[stored.dtype], stored.begin - block.begin
        if stored.num_bytes == 0:
            yield name, torch.empty(stored.shape, dtype=dtype)
            continue
        part = memory.whole[begin : begin + stored.num_bytes]
        memory.users.append(weakref.ref(part))
        tensor = torch.frombuffer(part, dtype=torch.uint8)
        del part
        if stored.begin % dtype.itemsize:
            tensor = tensor.clone()
        yield name, tensor.view(dtype).view(stored.shape)
        del tensor
