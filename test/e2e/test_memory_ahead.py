"""A run of a model with large files has memory taken while it imports, and leaves no process that holds any."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from .conftest import chat_line, collect, run_argv

pytestmark = pytest.mark.engine

_HOLDER = "sgl_batch.memory.held_memory"
# Of a tensor of layers that predict further tokens, which the model has no place for. Its file is a hole.
_NUM_FLOATS = 66 << 20


@pytest.fixture(scope="module")
def large_model(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("large") / "tiny-qwen3-moe"
    shutil.copytree(repo_root / "test" / "models" / "tiny-qwen3-moe", model)
    entry = {"dtype": "F32", "shape": [_NUM_FLOATS], "data_offsets": [0, 4 * _NUM_FLOATS]}
    header = json.dumps({"mtp.padding": entry}).encode()
    with (model / "padding.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 4 * _NUM_FLOATS)
    return model


def _holders_of(process: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in process.children():
        try:
            found += [child] if _HOLDER in child.cmdline() else []
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def _watch(argv: list[str], stderr: Path) -> tuple[int, set[psutil.Process]]:
    """Run a command to its end. Return its exit code, and the processes that held memory for it."""
    holders: set[psutil.Process] = set()
    with stderr.open("w") as file, subprocess.Popen(argv, stderr=file, env={**os.environ, "COLUMNS": "120"}) as run:
        deadline = time.monotonic() + 300
        while run.poll() is None and time.monotonic() < deadline:
            holders.update(_holders_of(psutil.Process(run.pid)))
            time.sleep(0.02)
        run.kill()
    return run.returncode, holders


def test_memory_is_held_until_the_engine_has_it(repo_root: Path, large_model: Path, tmp_path: Path) -> None:
    source, output, stderr = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "stderr"
    source.write_text(json.dumps(chat_line("one", "Return the", temperature=0)) + "\n")
    argv = run_argv(repo_root, source, output, "--device", "cpu", "--model", str(large_model))
    code, holders = _watch(argv, stderr)
    files = collect(code, stderr.read_text(), output)
    assert files.exit_code == 0, files.stderr
    assert [line["custom_id"] for line in files.output] == ["one"]
    assert len(holders) == 1
    assert not any(holder.is_running() for holder in holders)


def test_memory_is_not_held_for_a_command_that_is_refused(repo_root: Path, large_model: Path, tmp_path: Path) -> None:
    source, stderr = tmp_path / "in.jsonl", tmp_path / "stderr"
    source.write_text(json.dumps(chat_line("one", "Return the", temperature=0)) + "\n")
    argv = run_argv(repo_root, source, tmp_path / "out.jsonl", "--device", "cpu", "--model", str(large_model))
    code, holders = _watch([*argv, "--no-such-flag"], stderr)
    assert code == 1
    assert "--no-such-flag" in stderr.read_text()
    assert not any(holder.is_running() for holder in holders)
