"""Small tensors are read one by one or with their neighbours, as their files have them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sgl_batch.checkpoint.files import read_header
from sgl_batch.errors import ConfigError
from sgl_batch.weights.small_tensors import read_small_tensors

FAR = 5 << 20  # bytes


def test_tensors_have_their_numbers_wherever_they_lie(tmp_path: Path) -> None:
    files, whole, stored = ("a", "b"), {}, {}
    for file in files:
        tensors = {
            "near.0": torch.randn(3, 5),
            "near.1": torch.randn(7).to(torch.bfloat16),
            "near.2": torch.arange(9, dtype=torch.int32),
            "empty": torch.empty(0, 4),
            "odd": torch.randint(0, 256, (13,), dtype=torch.uint8),
            "odder": torch.randint(0, 126, (11,), dtype=torch.uint8).view(torch.float8_e4m3fn),
            "scalar": torch.tensor(2.5),
            "between": torch.zeros(FAR, dtype=torch.int8),
        }
        named = {f"{file}.{name}": one for name, one in tensors.items()}
        save_file(named, tmp_path / file)
        whole |= named
        stored |= read_header(tmp_path / file)
    wanted = {name: one for name, one in stored.items() if not name.endswith(".between")}
    found = dict(read_small_tensors(wanted))
    assert found.keys() == wanted.keys()
    for name, one in found.items():
        assert (one.dtype, one.shape) == (whole[name].dtype, whole[name].shape)
        assert torch.equal(one.view(-1).view(torch.uint8), whole[name].view(-1).view(torch.uint8))
    large = dict(read_small_tensors(stored))
    assert torch.equal(large["b.between"], whole["b.between"]), "a larger one than is read with others"


def test_nothing_between_is_read_of_tensors_far_from_each_other(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    many = {f"{number:03}.{part}": torch.full((1 << 16,), number) for number in range(40) for part in ("few", "many")}
    save_file({name: one[:4].clone() if name.endswith("few") else one for name, one in many.items()}, file)
    header = read_header(file)
    few = {name: one for name, one in header.items() if name.endswith("few")}
    before = _bytes_read()
    found = dict(read_small_tensors(few))
    assert [int(one[0]) for _, one in sorted(found.items())] == list(range(40))
    assert _bytes_read() - before < 40 * 4096, "of 20 MB"


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def test_a_file_that_is_cut_short_or_gone_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"one": torch.zeros(100), "two": torch.ones(100)}, file)
    stored = read_header(file)
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 8)
    with pytest.raises(ConfigError, match=r"model\.safetensors end before byte .* cut the file short; fetch it again"):
        list(read_small_tensors(stored))
    file.unlink()
    with pytest.raises(ConfigError, match=r"cannot read the weights .*model\.safetensors: No such file"):
        list(read_small_tensors(stored))
