"""Owns our own two wheels: sgl_batch, and its native kernels.

The kernels go as a wheel where they can be built for the target, else as source.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

from wheels.failure import WheelhouseError
from wheels.pip_runs import Pip, PipFailed
from wheels.target import Target

_NOT_SOURCE = ("build", "__pycache__", "*.egg-info", "*.so", "*.pyc")
_PACKAGE_PARTS = ("pyproject.toml", "README.md", "LICENSE", "python")


def build_package(pip: Pip, root: Path, house: Path) -> Path:
    """Build the wheel of sgl_batch."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            source = _copy_source(root, Path(scratch, "source"), _PACKAGE_PARTS)
            pip.run(["wheel", "--no-deps", "--wheel-dir", scratch, str(source)])
        except PipFailed as failed:
            raise WheelhouseError(f"the wheel of {root} cannot be built. What pip said:\n{failed}") from failed
        (built,) = Path(scratch).glob("*.whl")
        return Path(shutil.move(built, house / built.name))


def build_kernels(source: Path, house: Path, target: Target, torch: str | None) -> tuple[Path, str]:
    """Build the kernels' wheel for the target's Python and `torch` version, or return their source and the reason.

    They are compiled against torch: this interpreter's if it is the one, else the one in the wheelhouse.
    """
    with tempfile.TemporaryDirectory() as scratch:
        try:
            python = _builder(target, torch, house, Path(scratch))
            options = ["--no-build-isolation", "--no-deps", "--disable-pip-version-check", "--wheel-dir", scratch]
            _run([python, "-m", "pip", "wheel", *options, str(_copy_source(source, Path(scratch, "source")))])
        except _CannotBuild as reason:
            return _pack_source(source, house), str(reason)
        (built,) = Path(scratch).glob("*.whl")
        return Path(shutil.move(built, house / built.name)), ""


class _CannotBuild(Exception):  # noqa: N818  an answer: the source goes along instead
    pass


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise _CannotBuild("building failed:\n" + "\n".join(f"  {line}" for line in done.stdout.splitlines()[-8:]))


def _builder(target: Target, torch: str | None, house: Path, scratch: Path) -> str:
    """Make a Python of the target's version with the target's torch and setuptools."""
    if torch is None:
        raise _CannotBuild("it is not known which torch the target has")
    glibc = tuple(int(part) for part in (platform.libc_ver()[1] or "0.0").split(".")[:2])
    if platform.machine() != "x86_64" or not (0, 0) < glibc <= target.glibc:
        here = f"this machine ({platform.machine()}, glibc {glibc[0]}.{glibc[1]})"
        raise _CannotBuild(f"{here} is no x86-64 Linux with the target's glibc or an older one")
    if not any(shutil.which(name) for name in os.environ.get("CXX", "g++").split()):
        raise _CannotBuild("this machine has no C++ compiler")
    if _version_here("torch") == torch and f"{sys.version_info[0]}.{sys.version_info[1]}" == target.python:
        return sys.executable
    if not list(house.glob("torch-*.whl")):
        raise _CannotBuild(f"this Python does not have the target's torch {torch}, and neither has the wheelhouse")
    if list(house.glob("nvidia_*.whl")):
        raise _CannotBuild(
            f"this Python does not have torch {torch}; installing it with CUDA to build would take gigabytes"
        )
    python = _python_of(target.python)
    environment = scratch / "environment"
    _run([python, "-m", "venv", str(environment)])
    inside = str(environment / "bin" / "python")
    find = ["--no-index", "--find-links", str(house), "--disable-pip-version-check"]
    _run([inside, "-m", "pip", "install", "--quiet", *find, "torch", "setuptools", "numpy", "packaging"])
    return inside


def _version_here(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python_of(version: str) -> str:
    """Find a Python of this version, such as "3.12"."""
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    name = sys.executable if here == version else f"python{version}"
    probe = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([name, "-c", probe], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise _CannotBuild(f"this machine has no Python {version}") from None
    if done.stdout.strip() != version:
        raise _CannotBuild(f"this machine has no Python {version}")
    return name


def _copy_source(source: Path, goal: Path, parts: tuple[str, ...] = ()) -> Path:
    """Copy the source without the files of earlier builds: setuptools would pack modules that were deleted."""
    ignored = shutil.ignore_patterns(*_NOT_SOURCE)

    def ignore(folder: str, names: list[str]) -> set[str]:
        others = {name for name in names if parts and Path(folder) == source and name not in parts}
        return others | ignored(folder, names)

    shutil.copytree(source, goal, ignore=ignore)
    return goal


def _pack_source(source: Path, house: Path) -> Path:
    """Pack the source as an archive that pip can build on the target."""
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stem = f"{project['name'].replace('-', '_')}-{project['version']}"
    path = house / f"{stem}.tar.gz"
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(path, "w:gz") as archive:
        archive.add(_copy_source(source, Path(scratch, stem)), arcname=stem)
    return path
