"""Real processes: the `sgl-batch` command and the HTTP server, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

MODEL = "tiny"


@dataclass(frozen=True)
class RunFiles:
    """What one run of the command left behind."""

    exit_code: int
    stderr: str
    output: list[dict[str, Any]]
    errors: list[dict[str, Any]]
    manifest: dict[str, Any]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_argv(repo_root: Path, source: Path, output: Path, *flags: str) -> list[str]:
    """The command line of a run on the tiny Qwen3-MoE model in float32."""
    model = str(repo_root / "test" / "models" / "tiny-qwen3-moe")
    command = [sys.executable, "-m", "sgl_batch.cli", "run", "-i", str(source), "-o", str(output)]
    return [*command, "--model", model, "--served-model-name", MODEL, "--dtype", "float32", *flags]


def collect(exit_code: int, stderr: str, output: Path) -> RunFiles:
    manifest = output.with_name(f"{output.stem}.manifest.json")
    return RunFiles(
        exit_code=exit_code,
        stderr=stderr,
        output=read_lines(output),
        errors=read_lines(output.with_name(f"{output.stem}.errors.jsonl")),
        manifest=json.loads(manifest.read_text()) if manifest.exists() else {},
    )


@pytest.fixture(scope="session")
def run_command(repo_root: Path) -> Callable[..., RunFiles]:
    def run(source: Path, output: Path, *flags: str) -> RunFiles:
        argv = run_argv(repo_root, source, output, *flags)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=400, env={**os.environ, "COLUMNS": "120"})
        return collect(done.returncode, done.stderr, output)

    return run


def chat_line(custom_id: str, content: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": MODEL, "messages": messages, "max_tokens": 16, **body},
    }
