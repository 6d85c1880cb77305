"""Owns what all tests share: the repository's paths, their order, their time limit, and no use of the network
or of the user's cache.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.faulthandler import (
    fault_handler_stderr_fd_key,
    get_exit_on_timeout_config_value,
    get_timeout_config_value,
)

# Set before a test module imports transformers or starts an engine: a model is a directory, never a download.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
# The user's profiles and choices of earlier starts decide nothing here. Set once, before any fork server starts: a test
# that changed it would start another one.
_USER_CACHE = tempfile.TemporaryDirectory(prefix="sgl-batch-cache-")
os.environ["XDG_CACHE_HOME"] = _USER_CACHE.name


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files that take longest first, so that no worker is left with a long one at the end.

    `file_seconds.txt` has their seconds; files that are not in it are short and come last, in their order.
    """
    here = Path(__file__).resolve().parent
    lines = (here / "file_seconds.txt").read_text(encoding="utf-8").splitlines()
    seconds = {here / name: int(number) for number, name in map(str.split, lines)}
    items.sort(key=lambda item: -seconds.get(item.path, 0))


def pytest_collection_finish() -> None:
    """Leave thousands of collected tests, which live to the end, out of every later garbage collection."""
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Set pytest's time limit again, which it lifts when a test fails: later code may hang as well."""
    _limit_time(node.config)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Give the end of the process the time limit of a test."""
    _limit_time(session.config)


def _limit_time(config: pytest.Config) -> None:
    seconds, ends = get_timeout_config_value(config), get_exit_on_timeout_config_value(config)
    if seconds > 0 and not config.getoption("usepdb"):
        faulthandler.dump_traceback_later(seconds, exit=ends, file=config.stash[fault_handler_stderr_fd_key])


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """Return the repository's root directory."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def data_dir(repo_root: Path) -> Path:
    """Return the directory of small data files that ship with the tests."""
    return repo_root / "test" / "data"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 8 MiB and yield its path."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "sgl-batch-test", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no small file system can be mounted here; other tests cover the same errors without one")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture(scope="session")
def ray_environment() -> Iterator[dict[str, str]]:
    """Prepare this process for Ray, once: it reads its token once. Return the variables for other processes."""
    from sgl_batch.control_plane.ray_environment import prepare
    from sgl_batch.owned_directory import OwnedDirectory

    directory = OwnedDirectory.make("sgl-batch-ray-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        yield prepare(directory.path)
    directory.remove()
