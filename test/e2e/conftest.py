"""Real processes: the `sgl-batch` command and the HTTP server, on a tiny model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

MODEL = "tiny"


@dataclass(frozen=True)
class RunFiles:
    """The exit code, standard error and files of one run of the command."""

    exit_code: int
    stderr: str
    output: list[dict[str, Any]]
    errors: list[dict[str, Any]]
    manifest: dict[str, Any]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_argv(repo_root: Path, source: Path, output: Path, *flags: str) -> list[str]:
    """Return the command line of a run on the tiny Qwen3-MoE model in float32."""
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


# A server stops when it has answered everything. Then the end of the engine's processes takes time.
STOPS_WITHIN_S = 30


@dataclass(frozen=True)
class Server:
    """A running HTTP server; its jobs are in `jobs_dir`."""

    url: str
    process: subprocess.Popen[str]
    jobs_dir: Path

    def stop(self) -> int:
        """Send it SIGTERM, wait for its end and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=STOPS_WITHIN_S)


@pytest.fixture(scope="module")
def start_server(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Return a function that starts servers of the tiny Qwen3-MoE model in float32. The fixture stops them."""
    processes: list[subprocess.Popen[str]] = []

    def start(*flags: str, jobs_dir: Path | None = None) -> Server:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        argv = [sys.executable, "-m", "sgl_batch.launch_server", "--port", str(port), "--dtype", "float32"]
        argv += ["--model-path", str(repo_root / "test" / "models" / "tiny-qwen3-moe"), "--served-model-name", MODEL]
        directory = tmp_path_factory.mktemp("server")
        jobs_dir = jobs_dir or directory / "jobs"
        argv += ["--jobs-dir", str(jobs_dir), "--log-level", "warning", *flags]
        log = directory / "log.txt"
        with log.open("w") as file:
            process = subprocess.Popen(argv, stderr=file, text=True)
        processes.append(process)
        server = Server(f"http://127.0.0.1:{port}", process, jobs_dir)
        deadline = time.monotonic() + 300
        while not is_healthy(server.url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.1)
        return server

    yield start
    for process in processes:
        process.terminate()
        try:
            process.wait(timeout=STOPS_WITHIN_S)
        finally:
            process.kill()
            process.wait()


def is_healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).status_code == 200
    except requests.RequestException:
        return False


def chat_line(custom_id: str, content: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": MODEL, "messages": messages, "max_tokens": 16, **body},
    }
