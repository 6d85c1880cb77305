"""A command that cannot start exits with 1 and one sentence; a server does not start its engine again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_batch.engine import Engine
from sgl_batch.errors import ConfigError

from .conftest import chat_line, run_argv

pytestmark = pytest.mark.engine

# Too little memory is found in the engine's process, when it loads the model; all else is found before.
TOO_LITTLE = ("--device-memory", "100M")
NEEDS = "device_memory is 100.00 MiB, and "


def error_lines(argv: list[str]) -> list[str]:
    """Run a command that must exit with 1 and no traceback; return its lines of standard error."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "server_args=" not in done.stderr
    return done.stderr.splitlines()


def test_a_run_that_cannot_start_ends_with_one_sentence(repo_root: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(chat_line("a", "x")) + "\n")
    argv = run_argv(repo_root, source, tmp_path / "out.jsonl", "--progress", "off", "--model", "no/such/model")
    assert error_lines(argv)[-1].startswith("sgl-batch run: error: the model no/such/model does not exist")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("model", "flags", "words"),
    [("no/such/model", (), "the model no/such/model does not exist"), ("tiny-qwen3-moe", TOO_LITTLE, NEEDS)],
)
def test_a_server_whose_engine_cannot_start_ends_at_once(
    repo_root: Path, tmp_path: Path, model: str, flags: tuple[str, ...], words: str
) -> None:
    own = repo_root / "test" / "models" / model
    argv = [sys.executable, "-m", "sgl_batch.launch_server", "--port", "0", "--jobs-dir", str(tmp_path / "jobs")]
    lines = error_lines([*argv, "--model-path", str(own) if own.exists() else model, *flags])
    errors = [line for line in lines if words in line]
    assert len(errors) == 1
    assert errors[0].startswith("launch_server: error: ")
    assert not any("started again" in line for line in lines)


def test_an_engine_in_python_raises_the_same_sentence(repo_root: Path) -> None:
    with pytest.raises(ConfigError, match="the model no/such/model does not exist"):
        Engine(model_path="no/such/model")
    model = str(repo_root / "test" / "models" / "tiny-qwen3-moe")
    ranks = {"tp_size": 3, "dp_size": 3, "ep_size": 3, "enable_dp_attention": True}
    with pytest.raises(ConfigError, match=r"3 ranks cannot share 16 experts evenly; choose one of 1, 2, 4, 8, 16"):
        Engine(model_path=model, **ranks)
    with pytest.raises(ConfigError, match="max_total_tokens is -5; it must be at least 1"):
        Engine(model_path=model, max_total_tokens=-5)
    with pytest.raises(ConfigError, match=r"SGLang refuses these arguments: .*context_length \(100000\)"):
        Engine(model_path=model, context_length=100000)
