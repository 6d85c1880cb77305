"""Tests of a wheelhouse in folders of limited size: the files that wheels lose, and the folder of each wheel."""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from wheel_builder import build_wheel, record_hash

from wheels.failure import WheelhouseError
from wheels.parts import MIB, packed, parse_size, split_into_parts, trimmed_into

FILES = {
    "xgrammar": {"xgrammar/__init__.py": b"VALUE = 3\n", "xgrammar/libxgrammar.a": b"!", "xgrammar/binding.so": b"so"},
    "sglang": {"sglang/__init__.py": b"", "sglang/srt/a.py": b"", "sglang/multimodal_gen/b.py": b""},
    "flashinfer-python": {
        "flashinfer/__init__.py": b"",
        "flashinfer/data/csrc/norm.cu": b"//",
        "flashinfer/data/aot/norm.so": b"so",
        "flashinfer/jit/core.py": b"",
    },
    "other": {"other/__init__.py": b"", "other/libother.a": b"!"},
}


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("xgrammar", {"xgrammar/libxgrammar.a"}),
        ("sglang", {"sglang/multimodal_gen/b.py"}),
        ("flashinfer-python", {"flashinfer/data/csrc/norm.cu", "flashinfer/data/aot/norm.so"}),
        ("other", set()),
    ],
)
def test_a_wheel_loses_files_that_are_never_loaded_and_keeps_its_name_and_a_true_record(
    name: str, lost: set[str], tmp_path: Path
) -> None:
    whole = build_wheel(tmp_path, name, "1.2", FILES[name])
    (tmp_path / "part").mkdir()
    trimmed = trimmed_into(whole, tmp_path / "part")
    assert trimmed.name == whole.name
    with zipfile.ZipFile(whole) as before, zipfile.ZipFile(trimmed) as after:
        assert set(before.namelist()) - set(after.namelist()) == lost
        (record,) = [member for member in after.namelist() if member.endswith("/RECORD")]
        rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(after.read(record).decode()))}
        assert rows.pop(record) == ["", ""]
        contents = {member: after.read(member) for member in after.namelist() if member != record}
    assert rows == {member: [record_hash(content), str(len(content))] for member, content in contents.items()}


def test_names_go_into_few_groups_of_which_none_is_too_large() -> None:
    assert packed({"a": 6, "b": 5, "c": 4, "d": 4, "e": 1}, 10) == [["a", "c"], ["b", "d", "e"]]
    assert packed({"a": 10}, 10) == [["a"]]
    with pytest.raises(WheelhouseError, match=r"^big is 5.0 MiB, more than a part has room for \(4.0 MiB\). Raise --p"):
        packed({"small": MIB, "big": 5 * MIB}, 4 * MIB)


@pytest.mark.parametrize(("text", "size"), [("38M", 38 * MIB), ("1.5g", 3 << 29), ("64MiB", 64 * MIB), ("2K", 2048)])
def test_sizes_are_read_as_they_are_written(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["38", "M", "-1M", "38 apples"])
def test_other_words_are_no_size(text: str) -> None:
    with pytest.raises(WheelhouseError, match="give a number with K, M or G, such as 38M"):
        parse_size(text)


def test_parts_are_whole_together_and_install_one_after_the_other(tmp_path: Path) -> None:
    house = tmp_path / "house"
    heavy = {name: {**files, f"{name}/weights.py": b"W = %r" % os.urandom(20_000)} for name, files in FILES.items()}
    names = [build_wheel(house, name, "1.2", files).name for name, files in heavy.items()]
    (house / "kernels-0.1.tar.gz").write_bytes(bytes(3000))
    (house / "part-7").mkdir()
    limit = 8192 + max((house / name).stat().st_size for name in names) + 4000
    parts = split_into_parts(house, names, "kernels-0.1.tar.gz", limit)
    assert sorted(path.name for path in house.iterdir() if path.is_dir()) == [part.name for part in parts]
    assert all(sum(file.stat().st_size for file in part.iterdir()) <= limit for part in parts)
    found = sorted(file.name for part in parts for file in part.iterdir() if file.name != "INSTALL.txt")
    assert found == sorted([*names, "kernels-0.1.tar.gz"])
    assert (parts[-1] / "kernels-0.1.tar.gz").exists()
    assert f"--no-build-isolation {parts[-1].name}/kernels-0.1.tar.gz" in (parts[-1] / "INSTALL.txt").read_text()
    assert "pip install --no-index --no-deps part-1/*.whl" in (parts[0] / "INSTALL.txt").read_text()
    target = tmp_path / "target"
    wheels = sorted(wheel for part in parts for wheel in part.glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    subprocess.run([*pip, "--no-index", "--no-deps", "--target", str(target), *wheels], check=True)
    run = [sys.executable, "-c", "import xgrammar, sglang.srt.a; print(xgrammar.VALUE)"]
    done = subprocess.run(run, env={"PYTHONPATH": str(target)}, capture_output=True, text=True, check=True)
    assert done.stdout == "3\n"


def test_an_archive_that_does_not_fit_into_the_last_part_has_one_of_its_own(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, "other", "1.2", FILES["other"])
    (tmp_path / "kernels.tar.gz").write_bytes(bytes(4000))
    limit = 8192 + 4001
    parts = split_into_parts(tmp_path, [wheel.name], "kernels.tar.gz", limit)
    assert [sorted(file.name for file in part.iterdir()) for part in parts] == [
        ["INSTALL.txt", wheel.name],
        ["INSTALL.txt", "kernels.tar.gz"],
    ]
    with pytest.raises(WheelhouseError, match=r"kernels.tar.gz is 0.0 MiB, more than a part"):
        split_into_parts(tmp_path, [wheel.name], "kernels.tar.gz", limit - 100)
    assert not list(tmp_path.glob("part-*"))
