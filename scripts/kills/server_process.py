"""Owns the server's own process, which is started repeatedly over one directory of jobs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil

from sgl_batch.jobs.failpoints import VARIABLE

READY_WITHIN_S = 300


class ServerProcess:
    """The server with a tiny model. `flags`: more of its flags."""

    def __init__(self, model: Path, place: Path, flags: Sequence[str] = ()) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = place / "server.log"
        self._argv = [sys.executable, "-m", "sgl_batch.launch_server", "--port", str(port), "--dtype", "float32"]
        self._argv += ["--model-path", str(model), "--served-model-name", "tiny", "--jobs-dir", str(place / "jobs")]
        self._argv += ["--log-level", "warning", *flags]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, failpoint: str = "") -> None:
        """Start it; it is killed at the failpoint if one is given."""
        with self.log.open("ab") as log:
            environment = {**os.environ, VARIABLE: failpoint}
            self._process = subprocess.Popen(self._argv, stdout=log, stderr=log, env=environment)

    @property
    def process(self) -> psutil.Process:
        """The process that runs, or ran last."""
        assert self._process is not None, "it was started"
        return psutil.Process(self._process.pid)

    def has_ended(self) -> bool:
        """Return whether its process has ended."""
        return self._process is not None and self._process.poll() is not None

    def is_ready(self) -> bool:
        """Return whether its engine answers."""
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def until_ready(self) -> None:
        """Wait until its engine answers."""
        deadline = time.monotonic() + READY_WITHIN_S
        while not self.is_ready():
            assert not self.has_ended(), f"the server ended by itself, see {self.log}"
            assert time.monotonic() < deadline, f"the server is not ready after {READY_WITHIN_S} s, see {self.log}"
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill it if it runs, and wait for its end."""
        assert self._process is not None, "it was started"
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it in any state."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
