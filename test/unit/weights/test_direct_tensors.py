"""Tensors read past the page cache are those of the file, whatever becomes of the memory of earlier ones."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sgl_batch.errors import ConfigError
from sgl_batch.weights import direct_tensors as module
from sgl_batch.weights.direct_tensors import direct_tensors, read_past_page_cache

BLOCK = 16 << 10
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make blocks and pieces small. Return the list to which the size of each new memory is added."""
    sizes: list[int] = []
    new = module.huge_buffer

    def note(num_bytes: int) -> memoryview:
        sizes.append(num_bytes)
        return new(num_bytes)

    monkeypatch.setattr(module, "huge_buffer", note)
    monkeypatch.setattr(module, "_BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(module, "_PIECE_BYTES", BLOCK // 2)
    monkeypatch.setattr(module, "_AHEAD_BYTES", 2 * BLOCK)
    return sizes


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (numbers > 0) if dtype is torch.bool else (10 * numbers).to(dtype)


def save(file: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(tensors, file)
    return file


def many(directory: Path, count: int = 60) -> Path:
    return save(directory / "many.safetensors", {f"t.{i:03}": random(i, 37, 11) for i in range(count)})


def are_equal(one: Tensor, other: Tensor) -> bool:
    return (
        one.dtype is other.dtype
        and one.shape == other.shape
        and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    )


def test_tensors_of_all_formats_and_sizes_are_those_of_their_files(tmp_path: Path, buffers: list[int]) -> None:
    first = {f"{dtype}": random(1, 7, 5, dtype=dtype) for dtype in FLOATS + INTEGERS}
    second = {"large": random(2, 300, 100), "none": torch.empty(0, 4), "one": torch.tensor(3.0), "after": random(3, 9)}
    files = [save(tmp_path / "1.safetensors", first), save(tmp_path / "2.safetensors", second)]
    found = dict(direct_tensors(files))
    assert found.keys() == first.keys() | second.keys()
    assert all(are_equal(found[name], one) for name, one in (first | second).items())
    assert max(buffers) >= 300 * 100 * 4


def test_a_tensor_at_an_odd_byte_is_read_as_well(tmp_path: Path) -> None:
    header = (
        b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"F32","shape":[2],"data_offsets":[3,11]}}'
    )
    numbers = torch.tensor([1.5, -2.0])
    file = tmp_path / "odd.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"abc" + numbers.numpy().tobytes())
    assert dict(direct_tensors([file]))["b"].tolist() == [1.5, -2.0]


def test_memory_is_used_again_when_its_tensors_are_gone(tmp_path: Path, buffers: list[int]) -> None:
    file = many(tmp_path)
    stored = load_file(file)
    assert all(are_equal(tensor, stored[name]) for name, tensor in direct_tensors([file]))
    assert len(buffers) <= 5
    assert sum(buffers) < file.stat().st_size


def test_memory_of_a_large_tensor_is_not_kept(tmp_path: Path, buffers: list[int]) -> None:
    lent: list[Any] = []
    for num_bytes in (BLOCK, 8 * BLOCK, 8 * BLOCK):
        lent.append(module._take(lent, num_bytes))
    assert len(buffers) == 2
    assert [len(memory.whole) for memory in lent] == [BLOCK + 4096, 8 * BLOCK]
    small = module._take(lent, BLOCK)
    assert len(small.whole) == BLOCK + 4096
    assert lent == []


def test_tensors_that_are_kept_keep_what_they_hold(tmp_path: Path, buffers: list[int]) -> None:
    file = many(tmp_path)
    stored = load_file(file)
    kept = {name: tensor[1:] for name, tensor in direct_tensors([file]) if int(name[2:]) % 5 == 0}
    assert len(kept) == 12
    assert all(torch.equal(tensor, stored[name][1:]) for name, tensor in kept.items())
    assert len(buffers) > 6


def test_only_wanted_tensors_are_read(tmp_path: Path, buffers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    file, read, preadv = many(tmp_path), [], os.preadv

    def note(descriptor: int, memory: list[memoryview], offset: int) -> int:
        read.append(len(memory[0]))
        return preadv(descriptor, memory, offset)

    monkeypatch.setattr(module.os, "preadv", note)
    stored = load_file(file)
    found = dict(direct_tensors([file], lambda name: int(name[2:]) % 20 == 0))
    assert [*found] == ["t.000", "t.020", "t.040"]
    assert all(are_equal(tensor, stored[name]) for name, tensor in found.items())
    assert sum(read) < file.stat().st_size / 3


def test_a_file_that_is_cut_short_while_it_is_read_is_named(
    tmp_path: Path, buffers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AHEAD_BYTES", 1)
    file = many(tmp_path)
    tensors = direct_tensors([file])
    next(tensors)
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(ConfigError, match=r"many\.safetensors have [\d,]+ bytes, and by their header at least"):
        list(tensors)


def refuse(number: int, whole: list[bool]) -> Callable[..., int]:
    """Return a `preadv` that fails with this error number while `whole` is empty."""
    preadv = os.preadv

    def read(descriptor: int, memory: Any, offset: int) -> int:
        if not whole:
            if number == errno.EINVAL:
                whole.append(True)
            raise OSError(number, os.strerror(number))
        return preadv(descriptor, memory, offset)

    return read


def test_a_file_system_that_refuses_direct_reads_is_read_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = many(tmp_path, 3)
    monkeypatch.setattr(module.os, "preadv", refuse(errno.EINVAL, []))
    assert {name: are_equal(one, load_file(file)[name]) for name, one in direct_tensors([file])} == {
        f"t.{number:03}": True for number in range(3)
    }


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = many(tmp_path, 3)
    with pytest.raises(ConfigError, match=r"cannot read .*missing"):
        list(direct_tensors([tmp_path / "missing"]))
    monkeypatch.setattr(module.os, "preadv", refuse(errno.EIO, []))
    with pytest.raises(ConfigError, match=r"cannot read the weights .*many\.safetensors: Input/output error"):
        list(direct_tensors([file]))


def test_a_reader_that_is_left_early_leaves_no_file_open(tmp_path: Path, buffers: list[int]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    tensors = direct_tensors([many(tmp_path)])
    next(tensors)
    tensors.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_are_split_by_the_page_cache_and_by_known_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = b'{"x":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    strange = tmp_path / "strange.safetensors"
    strange.write_bytes(len(header).to_bytes(8, "little") + header + b"a")
    ours, cached = many(tmp_path, 3), save(tmp_path / "cached.safetensors", {"c": torch.ones(2)})
    monkeypatch.setattr(module, "files_to_read_past_it", lambda files: [file for file in files if file != cached])
    left, tensors = read_past_page_cache([strange, ours, cached], lambda name: name != "t.001")
    assert left == [strange, cached]
    assert [name for name, _ in tensors] == ["t.000", "t.002"]


def test_files_that_have_a_tensor_again_are_left_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "files_to_read_past_it", list)
    files = [many(tmp_path, 3), save(tmp_path / "more.safetensors", {"t.001": torch.ones(2)})]
    left, tensors = read_past_page_cache(files, lambda _: True)
    assert left == files
    assert list(tensors) == []
