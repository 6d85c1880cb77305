"""Owns where the ranks of one engine on one machine find each other: small files in a directory made for that.

What is written there, and what a rank's failure means, is decided by others.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sgl_batch.distributed.rank_errors import PeerTimeout

_POLL_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a group could not go on. `code`: as EngineError has it. `traceback`: of a fault of the program, or empty."""

    text: str
    code: str | None
    traceback: str


class Rendezvous:
    """Facts by name and rank, each written once and whole."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def publish(self, name: str, rank: int, text: str) -> None:
        """Let every rank know `text` of this one."""
        self._write(self.directory / f"{name}.{rank}", text)

    def await_all(self, name: str, ranks: Iterable[int], timeout_s: float) -> dict[int, str]:
        """What all `ranks` have published under `name`; PeerTimeout names those that have not."""
        deadline = time.monotonic() + timeout_s
        missing = set(ranks)
        found: dict[int, str] = {}
        while True:
            for rank in sorted(missing):
                path = self.directory / f"{name}.{rank}"
                if path.exists():
                    found[rank] = path.read_text()
            missing -= found.keys()
            if not missing:
                return found
            if time.monotonic() > deadline:
                raise PeerTimeout(missing, awaiting=f"its {name}", seconds=timeout_s)
            time.sleep(_POLL_S)

    def published(self, name: str) -> dict[int, str]:
        """What has been published under `name` so far, by rank."""
        return {int(path.suffix[1:]): path.read_text() for path in self.directory.glob(f"{name}.[0-9]*")}

    def report_failure(self, text: str, *, code: str = "", traceback: str = "") -> None:
        """Say why the group cannot go on. The first to say so is heard. `code`: as EngineError has it."""
        path = self.directory / "failure"
        own = path.with_suffix(f".{os.getpid()}")
        own.write_text(json.dumps({"text": text, "code": code or None, "traceback": traceback}))
        try:
            os.link(own, path)
        except FileExistsError:
            pass
        finally:
            own.unlink()

    def await_failure(self, timeout_s: float) -> None:
        """Wait until somebody has said why the group cannot go on, or for `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    @property
    def failure(self) -> Failure | None:
        """Why the group could not go on, if somebody has said so."""
        path = self.directory / "failure"
        return Failure(**json.loads(path.read_text())) if path.exists() else None

    def _write(self, path: Path, text: str) -> None:
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(text)
        draft.rename(path)
