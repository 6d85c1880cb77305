"""Owns running pip: this interpreter's, or a newer one that is fetched if this one is too old."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# The first version whose dry run reads an index's metadata files instead of fetching the wheels.
OLDEST_PIP = (24, 0)


class PipFailed(Exception):  # noqa: N818  an outcome that the caller may answer
    """pip ended with an error; the message is its whole output."""


class Pip:
    """pip, with the user's own settings of it (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf ...)."""

    def __init__(self, scratch: Path) -> None:
        version = importlib.metadata.version("pip")
        self._command = [sys.executable, "-m", "pip"]
        if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < OLDEST_PIP:
            print(f"pip {version} is older than {OLDEST_PIP[0]}: looking for a newer one for this run")
            try:
                self.run(["download", "--no-deps", "--only-binary=:all:", "--dest", str(scratch), "pip"])
                self._command = [sys.executable, str(next(scratch.glob("pip-*.whl")) / "pip")]
            except PipFailed:
                print("none found: with this one, wheels are fetched once to resolve and once to keep")

    def run(self, arguments: Sequence[str]) -> str:
        """Run pip to its end; return its output. Raises PipFailed."""
        command = [*self._command, *arguments, "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            # In English, because its messages about conflicts are parsed.
            env={**os.environ, "LC_ALL": "C.UTF-8"},
        )
        if done.returncode != 0:
            raise PipFailed(done.stdout)
        return done.stdout
