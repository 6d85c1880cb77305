"""Tests that a trimmed wheel lacks what its GPU never loads, and is a whole wheel otherwise."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.utils import parse_wheel_filename
from wheel_builder import build_wheel, kernel_wheel, record_hash

from wheels.failure import WheelhouseError
from wheels.trimming import Trim, trim_wheel

HOPPER = Trim(capability=(9, 0))
SMALLEST = Trim(capability=(9, 0), without=("flash_ops",))


def names_of(path: Path) -> set[str]:
    """The files of the wheel, without its own description."""
    with zipfile.ZipFile(path) as wheel:
        return {name for name in wheel.namelist() if ".dist-info/" not in name}


def test_only_the_other_architectures_kernels_are_dropped(tmp_path: Path) -> None:
    whole = kernel_wheel(tmp_path)
    assert names_of(whole) - names_of(trim_wheel(whole, HOPPER)) == {"sgl_kernel/sm100/common_ops.abi3.so"}


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_every_gpu_but_hopper_keeps_the_folder_that_the_loader_takes_for_it(
    tmp_path: Path, capability: tuple[int, int]
) -> None:
    whole = kernel_wheel(tmp_path)
    trimmed = trim_wheel(whole, Trim(capability=capability))
    assert names_of(whole) - names_of(trimmed) == {"sgl_kernel/sm90/common_ops.abi3.so"}


def test_a_library_that_is_not_wanted_is_dropped_and_none_with_a_longer_name(tmp_path: Path) -> None:
    whole = kernel_wheel(tmp_path)
    dropped = names_of(whole) - names_of(trim_wheel(whole, SMALLEST))
    assert dropped == {"sgl_kernel/sm100/common_ops.abi3.so", "sgl_kernel/flash_ops.abi3.so"}


def test_the_record_lists_each_file_with_its_hash_and_size(tmp_path: Path) -> None:
    with zipfile.ZipFile(trim_wheel(kernel_wheel(tmp_path), SMALLEST)) as wheel:
        (record,) = [name for name in wheel.namelist() if name.endswith("/RECORD")]
        rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(wheel.read(record).decode()))}
        assert rows.pop(record) == ["", ""]
        contents = {name: wheel.read(name) for name in wheel.namelist() if name != record}
    assert rows == {name: [record_hash(content), str(len(content))] for name, content in contents.items()}


def test_the_trimmed_version_satisfies_the_exact_requirement(tmp_path: Path) -> None:
    trimmed = trim_wheel(kernel_wheel(tmp_path), SMALLEST)
    name, version, _, _ = parse_wheel_filename(trimmed.name)
    assert (name, str(version)) == ("sglang-kernel", "0.4.5+sm90.noflashops")
    assert version in SpecifierSet("==0.4.5")


def test_a_version_that_is_local_already_stays_one(tmp_path: Path) -> None:
    trimmed = trim_wheel(kernel_wheel(tmp_path, "0.4.5+cu130"), HOPPER)
    assert parse_wheel_filename(trimmed.name)[1] in SpecifierSet("==0.4.5+cu130.sm90")


def test_times_and_permissions_of_files_are_kept(tmp_path: Path) -> None:
    whole = kernel_wheel(tmp_path)
    with zipfile.ZipFile(whole) as before, zipfile.ZipFile(trim_wheel(whole, HOPPER)) as after:
        for name in names_of(Path(after.filename or "")):
            old, new = before.getinfo(name), after.getinfo(name)
            assert (old.date_time, old.external_attr) == (new.date_time, new.external_attr)


def test_pip_installs_it_for_a_package_that_pins_the_plain_version(tmp_path: Path) -> None:
    house = tmp_path / "house"
    whole = kernel_wheel(house)
    trim_wheel(whole, SMALLEST)
    whole.unlink()
    build_wheel(house, "needs-it", "1.0", {"needs_it.py": b""}, ("sglang-kernel==0.4.5",))
    options = ["--no-index", "--find-links", str(house), "--target", str(tmp_path / "target"), "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "needs-it"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    info = tmp_path / "target" / "sglang_kernel-0.4.5+sm90.noflashops.dist-info" / "METADATA"
    # The header is changed; the description below, which has such a line too, is not.
    assert [line for line in info.read_text().splitlines() if line.startswith("Version")] == [
        "Version: 0.4.5+sm90.noflashops",
        "Version: 0.4.5",
    ]
    assert not (tmp_path / "target" / "sgl_kernel" / "sm100").exists()


def test_an_unknown_layout_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    whole = kernel_wheel(tmp_path, folders=("sm90", "sm100", "sm120"))
    with pytest.raises(WheelhouseError, match=r"sm100, sm120, sm90; this trimming knows sm90 and sm100"):
        trim_wheel(whole, HOPPER)
    assert list(tmp_path.iterdir()) == [whole]


def test_a_file_that_does_not_have_its_recorded_hash_is_refused(tmp_path: Path) -> None:
    whole = kernel_wheel(tmp_path)
    with zipfile.ZipFile(whole) as wheel:
        members = {entry: wheel.read(entry) for entry in wheel.infolist()}
    with zipfile.ZipFile(whole, "w") as wheel:
        for entry, content in members.items():
            wheel.writestr(entry, b"other" if entry.filename == "sgl_kernel/flash_attn.py" else content)
    with pytest.raises(WheelhouseError, match=r"hash of sgl_kernel/flash_attn.py .* remove the file"):
        trim_wheel(whole, HOPPER)
    assert list(tmp_path.iterdir()) == [whole]


def test_a_broken_download_is_refused(tmp_path: Path) -> None:
    whole = kernel_wheel(tmp_path)
    whole.write_bytes(whole.read_bytes()[:1000])
    with pytest.raises(WheelhouseError, match="no whole wheel"):
        trim_wheel(whole, HOPPER)
