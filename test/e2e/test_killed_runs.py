"""A run killed by SIGKILL keeps every finished line, and leaves no process and, once resumed, no temporary file."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from .conftest import chat_line, collect, read_lines, run_argv

pytestmark = pytest.mark.engine

WITHIN_S = 120
SLOW_TOKENS = 500
# The first line is slow; the results of all others wait for it.
LINES = [chat_line("slow", "Return the", max_tokens=SLOW_TOKENS, ignore_eos=True, temperature=0)]
LINES += [chat_line(f"line {n}", f"Say {n}.", max_tokens=4 + n % 5, temperature=0.8) for n in range(90)]


def answers(result_lines: list[dict[str, Any]]) -> list[Any]:
    """Return id, choices and usage of each line, without fields that depend on the run's id or the time."""
    return [
        (one["custom_id"], one["response"]["body"]["choices"], one["response"]["body"]["usage"]) for one in result_lines
    ]


def num_waiting_lines(output: Path) -> int:
    """Return the number of finished lines that wait for the first one."""
    return sum(path.read_bytes().count(b"\n") for path in output.parent.glob(f".{output.name}.kept-*"))


def wait_for(process: subprocess.Popen[str], output: Path, num_lines: int) -> None:
    deadline = time.monotonic() + WITHIN_S
    while num_waiting_lines(output) < num_lines:
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline, "no line was finished in time"
        time.sleep(0.02)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A directory of temporary files. Its name is short, as paths of sockets must be."""
    with tempfile.TemporaryDirectory(prefix="kept-") as name:
        yield Path(name)


def test_a_killed_run_keeps_the_lines_that_wait_for_a_slow_one_and_leaves_no_process(
    repo_root: Path, tmp_path: Path, temporary: Path
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    environment = {**os.environ, "TMPDIR": str(temporary)}
    flags = ("--progress", "off", "--b-moe-decode", "32")
    process = subprocess.Popen(
        run_argv(repo_root, source, output, *flags), stderr=subprocess.PIPE, text=True, env=environment
    )
    undisturbed = subprocess.Popen(run_argv(repo_root, source, tmp_path / "whole.jsonl", *flags))
    wait_for(process, output, 40)
    tree = psutil.Process(process.pid).children(recursive=True)
    assert len(tree) >= 2
    [shared_path_file] = temporary.glob("sgl-batch-*/outside")
    shared = Path(shared_path_file.read_text().strip())
    assert shared.exists()
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(tree, timeout=10)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE], "the engine ends with its run"
    kept = num_waiting_lines(output)
    assert 40 <= kept < len(LINES) - 1
    assert read_lines(output) == []

    argv = run_argv(repo_root, source, output, *flags, "--resume")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400, env=environment)
    resumed = collect(done.returncode, done.stderr, output)
    assert resumed.exit_code == 0, resumed.stderr
    assert resumed.manifest["resumed"][-1]["kept"] == kept
    usage = {one["custom_id"]: one["response"]["body"]["usage"]["completion_tokens"] for one in resumed.output}
    computed = resumed.manifest["engine"]["counters"]["sequences_finished"]
    assert computed == len(LINES) - kept, "nothing is computed twice"
    assert undisturbed.wait(timeout=400) == 0
    assert answers(resumed.output) == answers(read_lines(tmp_path / "whole.jsonl"))
    assert len(usage) == len(LINES)
    assert usage["slow"] == SLOW_TOKENS
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
    caches = {"torchinductor_" + getpass.getuser()}  # torch keeps its cache for later runs
    assert {path.name for path in temporary.iterdir()} <= caches
    assert not shared.exists()
