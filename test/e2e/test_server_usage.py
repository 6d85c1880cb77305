"""The server's help and its errors for bad flags, before it starts anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_batch.api.server_help import short_help

pytestmark = pytest.mark.engine


def test_the_long_help_lists_our_flags_before_sglangs_and_includes_the_short_help() -> None:
    argv = [sys.executable, "-m", "sgl_batch.launch_server", "--help-all"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 0
    own, ours, sglangs = (
        done.stdout.index(flag) for flag in ("--jobs-dir", "--b-attn-prefill", "--tensor-parallel-size")
    )
    assert own < ours < sglangs
    assert "sgl_batch: forward pass" in done.stdout
    named = set(re.findall(r"--[\w-]+", done.stdout))
    assert set(re.findall(r"^  (--[\w-]+)", short_help(), re.MULTILINE)) - {"--help-all"} <= named


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--b-moe-decode", "0"], "b_moe_decode is 0; it must be at least 1"),
        (["--port", "70000"], "at most 65535"),
        (["--host", "0.0.0.0"], "--allow-unauthenticated"),
    ],
)
def test_bad_usage_exits_with_1_and_names_the_fault(tmp_path: Path, flags: list[str], words: str) -> None:
    argv = [sys.executable, "-m", "sgl_batch.launch_server", "--model-path", "m", "--port", "0"]
    argv += ["--jobs-dir", str(tmp_path / "jobs"), *flags]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert words in done.stderr
    assert any(line.startswith("launch_server: error: ") for line in done.stderr.splitlines())
    assert "Traceback" not in done.stderr
