"""Temporary directories are removed with their process, and never before it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from sgl_batch.owned_directory import OwnedDirectory, register_shared_memory, remove_abandoned

OTHER = """
import sys
from pathlib import Path
from sgl_batch.owned_directory import OwnedDirectory
print(OwnedDirectory.make("test-", Path(sys.argv[1]), "testing").path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path) -> Any:
    """Yield a living process that owns a directory in `tmp_path`; `path` is the directory."""
    process: Any = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    process.path = Path(process.stdout.readline().strip())
    yield process
    process.kill()
    process.communicate()


def test_a_directory_is_left_alone_while_its_process_lives_and_removed_when_it_was_killed(
    other: Any, tmp_path: Path
) -> None:
    own = OwnedDirectory.make("test-", tmp_path)
    (other.path / "some.db").write_text("x")
    for _ in range(2):
        [living] = remove_abandoned("test-", tmp_path)
        assert (living.path, living.pid, living.purpose) == (other.path, other.pid, "testing")
    assert (other.path / "some.db").exists()
    other.kill()
    other.wait()
    assert remove_abandoned("test-", tmp_path) == []
    assert not other.path.exists()
    assert own.path.exists(), "its own process lives"
    own.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_an_owner_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "test-1").mkdir()
    (tmp_path / "test-1" / "owner-x").touch()
    (tmp_path / "test-2").mkdir()
    assert remove_abandoned("test-", tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test-1", "test-2"]


def test_directories_that_come_and_go_meanwhile_are_no_fault(tmp_path: Path) -> None:
    looked = threading.Event()

    def others_start_and_end() -> None:
        while not looked.is_set():
            OwnedDirectory.make("test-", tmp_path).remove()

    threads = [threading.Thread(target=others_start_and_end) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        found = [remove_abandoned("test-", tmp_path) for _ in range(1000)]
    finally:
        looked.set()
        for thread in threads:
            thread.join()
    assert found == [[]] * 1000
    assert list(tmp_path.iterdir()) == []


def test_registered_shared_memory_is_removed_with_its_directory(tmp_path: Path) -> None:
    own = OwnedDirectory.make("test-", tmp_path)
    shared, file = Path("/dev/shm") / own.path.name, tmp_path / "file"
    for path in (shared, file):
        path.write_text("x")
        register_shared_memory(own.path, path)
    own.remove()
    assert not shared.exists()
    assert file.exists(), "files elsewhere are not removed"


def test_a_second_removal_leaves_alone_the_file_that_has_the_lock_s_number_by_then(tmp_path: Path) -> None:
    with (tmp_path / "other").open("w") as other:
        number = other.fileno()  # the lowest free one, which the next open file gets
    own = OwnedDirectory.make("test-", tmp_path)
    own.remove()
    with (tmp_path / "other").open("w") as other:
        assert other.fileno() == number
        own.remove()
        os.fstat(number)
