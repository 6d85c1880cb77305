"""Tests which wheels a target needs, with pip's own resolver over a folder of small wheels."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from wheel_builder import build_wheel

from wheels.failure import WheelhouseError
from wheels.pip_runs import Pip
from wheels.resolution import Resolution, Resolver
from wheels.target import Target

TARGET = Target(python="3.12", glibc=(2, 39))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which pip finds wheels: an engine that needs torch, and torch with its CUDA libraries."""
    folder = tmp_path / "index"
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    build_wheel(folder, "engine", "1.0", {}, ("torch==2.11.0", "numpy>=2", 'only-there; python_version == "3.12"'))
    build_wheel(folder, "torch", "2.11.0", {}, ("nvidia-cublas", "filelock"))
    build_wheel(folder, "only-there", "1.0", {}, ('never; sys_platform == "win32"',))
    for name, version in [("nvidia-cublas", "13.1"), ("filelock", "3.0"), ("numpy", "2.3.5"), ("numpy", "2.4.0")]:
        build_wheel(folder, name, version, {})
    return folder


class OlderPip:
    """The pip at hand, whose report gives hashes as versions before 23.1 do."""

    def __init__(self, scratch: Path) -> None:
        self._pip = Pip(scratch)

    def run(self, arguments: Sequence[str]) -> str:
        output = self._pip.run(arguments)
        path = Path(arguments[arguments.index("--report") + 1])
        report = json.loads(path.read_text())
        for item in report["install"]:
            item["download_info"]["archive_info"].pop("hashes", None)
        path.write_text(json.dumps(report))
        return output


def resolve(tmp_path: Path, present: dict[str, str], *requirements: str) -> Resolution:
    """Return the packages that the target needs and does not have."""
    return Resolver(Pip(tmp_path), TARGET, present).resolve(requirements or ["engine"])


def needed(resolution: Resolution) -> dict[str, str]:
    """The versions of the wheels to fetch."""
    return {wheel.name: wheel.version for wheel in resolution.wheels}


@pytest.mark.parametrize("kind", [Pip, OlderPip])
def test_the_hash_of_a_wheel_is_known_from_every_pip(tmp_path: Path, index: Path, kind: Any) -> None:
    [wheel] = Resolver(kind(tmp_path), TARGET, {}).resolve(["filelock"]).wheels
    assert wheel.sha256 == hashlib.sha256((index / wheel.filename).read_bytes()).hexdigest()


@pytest.mark.usefixtures("index")
def test_the_target_gets_the_packages_of_its_own_markers(tmp_path: Path) -> None:
    everything = {"engine": "1.0", "torch": "2.11.0", "nvidia-cublas": "13.1", "filelock": "3.0", "numpy": "2.4.0"}
    assert needed(resolve(tmp_path, {})) == {**everything, "only-there": "1.0"}


@pytest.mark.usefixtures("index")
def test_packages_of_the_target_are_left_out_with_those_that_only_they_require(tmp_path: Path) -> None:
    resolution = resolve(tmp_path, {"torch": "2.11.0+cu130", "numpy": "2.3.5"})
    assert needed(resolution) == {"engine": "1.0", "only-there": "1.0"}
    assert resolution.kept == {"torch": "2.11.0+cu130", "numpy": "2.3.5"}
    assert resolution.conflicts == []


@pytest.mark.usefixtures("index")
def test_a_version_that_does_not_fit_gives_way_and_is_listed(tmp_path: Path) -> None:
    resolution = resolve(tmp_path, {"torch": "2.11.0+cu130", "numpy": "1.26.0"})
    assert needed(resolution) == {"engine": "1.0", "only-there": "1.0", "numpy": "2.4.0"}
    (conflict,) = resolution.conflicts
    assert (conflict.name, conflict.present, conflict.chosen) == ("numpy", "1.26.0", "2.4.0")
    assert "engine 1.0 depends on numpy>=2" in conflict.wanted_by


@pytest.mark.usefixtures("index")
def test_another_torch_on_the_target_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(WheelhouseError, match=r"has torch 2\.10\.0, but: engine 1\.0 depends on torch==2\.11\.0.*Take"):
        resolve(tmp_path, {"torch": "2.10.0", "numpy": "2.3.5"})


@pytest.mark.usefixtures("index")
def test_a_package_without_a_wheel_is_named(tmp_path: Path) -> None:
    with pytest.raises(WheelhouseError, match=r"no wheel of absent==1\.0 for the target"):
        resolve(tmp_path, {}, "absent==1.0")


def test_an_extra_of_a_package_that_the_target_has_is_brought_without_the_package(tmp_path: Path, index: Path) -> None:
    build_wheel(index, "caller", "1.0", {}, ("server[fast]",))
    build_wheel(index, "server", "1.0", {}, ("numpy", "filelock; extra == 'fast'"), ("fast",))
    resolution = resolve(tmp_path, {"server": "1.0", "numpy": "2.3.5"}, "caller")
    assert needed(resolution) == {"caller": "1.0", "filelock": "3.0"}
