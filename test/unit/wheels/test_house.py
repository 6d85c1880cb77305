"""Tests of the directory of wheels: nothing is fetched twice, and nothing that is not ours is removed."""

from __future__ import annotations

from pathlib import Path

import pytest
from wheel_builder import build_wheel, kernel_wheel

from wheels.failure import WheelhouseError
from wheels.house import House
from wheels.pip_runs import Pip
from wheels.resolution import ResolvedWheel, Resolver
from wheels.target import Target
from wheels.trimming import Trim

TARGET = Target(python="3.12", glibc=(2, 39))
HOPPER = Trim(capability=(9, 0))


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    """pip, without a network, over a folder that has a small sglang-kernel and numpy."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    kernel_wheel(tmp_path / "index")
    build_wheel(tmp_path / "index", "numpy", "2.4.0", {})
    return Pip(tmp_path)


def resolved(pip: Pip) -> list[ResolvedWheel]:
    """Both wheels."""
    return Resolver(pip, TARGET, {}).resolve(["sglang-kernel", "numpy"]).wheels


def test_an_interrupted_or_damaged_house_fetches_only_what_is_missing(
    tmp_path: Path, pip: Pip, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels, house_dir = resolved(pip), tmp_path / "house"
    House(house_dir).fetch(pip, wheels, TARGET, None, print)
    (house_dir / "numpy-2.4.0-py3-none-any.whl").write_bytes(b"half")
    (house_dir / "partial").mkdir()
    (house_dir / "partial" / "numpy-2.4.0-py3-none-any.whl").write_bytes(b"half")
    capsys.readouterr()
    House(house_dir).fetch(pip, wheels, TARGET, None, print)
    assert capsys.readouterr().out == "1 of 2 wheels are there already\n[1/1] numpy\n"
    assert (house_dir / "numpy-2.4.0-py3-none-any.whl").stat().st_size > 100


def test_a_trimmed_wheel_stands_for_the_whole_one(tmp_path: Path, pip: Pip, capsys: pytest.CaptureFixture[str]) -> None:
    wheels, house_dir = resolved(pip), tmp_path / "house"
    for _ in range(2):
        house = House(house_dir)
        house.fetch(pip, wheels, TARGET, HOPPER, print)
        assert house.trim(wheels, HOPPER) == "sglang_kernel-0.4.5+sm90-py3-none-any.whl"
    assert capsys.readouterr().out.splitlines()[-1] == "2 of 2 wheels are there already"
    assert house.record["whole_bytes"] == (tmp_path / "index" / "sglang_kernel-0.4.5-py3-none-any.whl").stat().st_size
    assert sorted(path.name for path in house_dir.glob("*.whl")) == [
        "numpy-2.4.0-py3-none-any.whl",
        "sglang_kernel-0.4.5+sm90-py3-none-any.whl",
    ]


def test_a_download_that_differs_from_the_resolved_wheel_is_refused(tmp_path: Path, pip: Pip) -> None:
    wheels = resolved(pip)
    build_wheel(tmp_path / "index", "numpy", "2.4.0", {"changed.py": b""})
    with pytest.raises(WheelhouseError, match=r"(?s)a download failed.*Run the same command again"):
        House(tmp_path / "house").fetch(pip, wheels, TARGET, None, print)


def test_only_files_that_an_earlier_run_wrote_are_removed(tmp_path: Path) -> None:
    house = House(tmp_path / "house")
    for name in ("old.whl", "new.whl", "of-the-user.txt"):
        (house.path / name).touch()
    house.remember(house.path / "old.whl", house.path / "new.whl")
    House(house.path).remove_all_but(["new.whl"])
    assert sorted(path.name for path in house.path.iterdir()) == [".wheelhouse.json", "new.whl", "of-the-user.txt"]


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(WheelhouseError, match="holds other files"):
        House(tmp_path)


def test_trimming_a_package_that_is_not_brought_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WheelhouseError, match="the target has it already"):
        House(tmp_path / "house").trim([], HOPPER)
