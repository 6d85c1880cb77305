"""Owns the rendezvous of the ranks of one engine on one machine: small files in a directory made for that.

It does not know what the files say, or what follows from a failure.
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
    """Why the ranks could not go on. `code`: EngineError's. `traceback`: of a fault of the program, or empty."""

    text: str
    code: str | None
    traceback: str


class Rendezvous:
    """Texts by name and rank, each written once; a reader sees a text whole or not at all."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def publish(self, name: str, rank: int, text: str) -> None:
        """Publish `text` of this rank under `name`, for all processes of the engine."""
        self._write(self.directory / f"{name}.{rank}", text)

    def await_all(self, name: str, ranks: Iterable[int], timeout_s: float) -> dict[int, str]:
        """Wait until all `ranks` have published `name`; return the texts by rank.

        Raises PeerTimeout, which names the ranks that have not.
        """
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
        """Return the texts published under `name` so far, by rank."""
        return {int(path.suffix[1:]): path.read_text() for path in self.directory.glob(f"{name}.[0-9]*")}

    def report_failure(self, text: str, *, code: str = "", traceback: str = "") -> None:
        """Report why the ranks cannot go on. Only the first report of any process is kept. `code`: EngineError's."""
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
        """Wait until a process has reported a failure, at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    @property
    def failure(self) -> Failure | None:
        """The failure that was reported first, or None."""
        path = self.directory / "failure"
        return Failure(**json.loads(path.read_text())) if path.exists() else None

    def _write(self, path: Path, text: str) -> None:
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(text)
        draft.rename(path)
