"""When a host KV store fails, finished lines are kept, the other lines get the reason, and no file is left."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from .conftest import RunFiles, chat_line, collect, run_argv
from .test_run_command import wait_for_output

pytestmark = pytest.mark.engine

NUM_LINES, NUM_SHORT = 120, 40
ENDS_WITHIN_S = 120
SMALL = ["--page-size", "8", "--boundary-tokens", "8", "--b-moe-decode", "16", "--max-total-tokens", "480"]


@pytest.fixture(scope="module")
def fault_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the library that makes calls on the store's file fail on request."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("faults") / "store_faults.so"
    source = Path(__file__).with_name("store_faults.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


@dataclass
class Job:
    """A run that would take minutes, with its KV in a file in `disk`; short lines finish early."""

    process: subprocess.Popen[str]
    output: Path

    def end(self) -> RunFiles:
        """Wait until it has ended by itself, and return its files."""
        _, stderr = self.process.communicate(timeout=ENDS_WITHIN_S)
        return collect(self.process.returncode, stderr, self.output)


@pytest.fixture
def start(repo_root: Path, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def begin(disk: Path, store_bytes: str, num_lines: int = NUM_LINES, **environment: str) -> Job:
        source, output = tmp_path / "in.jsonl", tmp_path / f"out-{len(jobs)}.jsonl"
        lines = [
            chat_line(f"line-{i}", "Return the", temperature=0, max_tokens=4 + 300 * (i >= NUM_SHORT), ignore_eos=True)
            for i in range(num_lines)
        ]
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        store = ["--kv-store-dir", str(disk), "--kv-store-bytes", store_bytes]
        process = subprocess.Popen(
            run_argv(repo_root, source, output, "--progress", "plain", *SMALL, *store),
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        jobs.append(Job(process, output))
        return jobs[-1]

    yield begin
    for job in jobs:
        if job.process.poll() is None:
            os.killpg(job.process.pid, signal.SIGKILL)
            job.process.wait()


def fill(path: Path) -> None:
    """Write a file that takes all free bytes of its file system."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    assert shutil.disk_usage(path.parent).free == 0


def answers(files: RunFiles) -> list[str]:
    return [line["response"]["body"]["choices"][0]["message"]["content"] for line in files.output]


def check_other_lines_fail(files: RunFiles, *words: str) -> None:
    """Check that every line has an output or an error, and that each error has these words."""
    assert files.exit_code == 2, files.stderr
    assert len(files.output) >= 20
    assert len(files.output) + len(files.errors) == NUM_LINES
    names = [line["custom_id"] for line in (*files.output, *files.errors)]
    assert sorted(names) == sorted(f"line-{number}" for number in range(NUM_LINES))
    for line in files.errors:
        assert line["response"]["status_code"] == 503
        error = line["response"]["body"]["error"]
        assert error["code"] == "kv_store_failed"
        assert all(word in error["message"] for word in words), error["message"]
    assert f"{len(files.errors)}  kv_store_failed" in files.stderr


def test_a_full_disk_fails_the_other_lines_with_an_error_that_names_the_remedy(
    start: Callable[..., Job], small_disk: Path
) -> None:
    job = start(small_disk, "6M")
    wait_for_output(job.process, job.output)
    fill(small_disk / "other_users_file")
    files = job.end()
    check_other_lines_fail(files, "No space left on device", str(small_disk), "--kv-store-dir", "--kv-store-bytes")
    assert [path.name for path in small_disk.iterdir()] == ["other_users_file"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [(str(errno.EIO), ["Input/output error"]), ("cut", ["cut it short"])],
    ids=["failing-device", "file-cut-short"],
)
def test_a_store_that_fails_in_a_copy_thread_fails_the_other_lines(
    fault: str, words: list[str], start: Callable[..., Job], fault_library: Path, tmp_path: Path
) -> None:
    disk, now = tmp_path / "disk", tmp_path / "now"
    disk.mkdir()
    job = start(disk, "64M", LD_PRELOAD=str(fault_library), STORE_FAULT=fault, STORE_FAULT_WHEN=str(now))
    wait_for_output(job.process, job.output)
    now.touch()
    check_other_lines_fail(job.end(), *words)
    assert list(disk.iterdir()) == []


def test_a_scheduler_killed_while_it_writes_ends_the_run_leaves_nothing_and_a_second_run_works(
    start: Callable[..., Job], fault_library: Path, tmp_path: Path
) -> None:
    disk, now = tmp_path / "disk", tmp_path / "now"
    disk.mkdir()
    job = start(disk, "64M", LD_PRELOAD=str(fault_library), STORE_FAULT="kill", STORE_FAULT_WHEN=str(now))
    wait_for_output(job.process, job.output)
    now.touch()
    files = job.end()
    assert files.exit_code == 3, files.stderr
    assert "the scheduler died: SIGKILL (its process was killed)" in files.stderr
    assert len(files.output) >= 20
    assert list(disk.iterdir()) == []
    again = start(disk, "64M", num_lines=NUM_SHORT).end()
    assert again.exit_code == 0, again.stderr
    assert answers(again)[:20] == answers(files)[:20]
