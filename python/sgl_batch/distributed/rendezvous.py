"""Owns where the ranks of one engine on one machine find each other: small files in a directory made for that.

What is written there, and what a rank's failure means, is decided by others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sgl_batch.distributed.rank_errors import PeerTimeout, RankError
from sgl_batch.errors import BAD_USAGE, ConfigError, SglBatchError, StoreError

_POLL_S = 0.01


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

    def report_failure(self, text: str, *, code: str = "") -> None:
        """Say why the group cannot go on. The first to say so is heard. `code`: as EngineError has it."""
        path = self.directory / "failure"
        own = path.with_suffix(f".{os.getpid()}")
        own.write_text(f"{code}\n{text}")
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

    @contextmanager
    def telling(self, rank: int | None = None) -> Iterator[None]:
        """Report what of our own errors ends this block: SGLang only logs it, and ends the process.

        What is wrong with another rank is told by those that watch it.
        """
        try:
            yield
        except RankError:
            raise
        except SglBatchError as error:
            who = "" if rank is None else f"rank {rank} of the engine failed: "
            code = error.code if isinstance(error, StoreError) else BAD_USAGE if isinstance(error, ConfigError) else ""
            self.report_failure(f"{who}{error}", code=code)
            raise

    @property
    def failure(self) -> str | None:
        """Why the group could not go on, if somebody has said so."""
        told = self._told()
        return told and told[1]

    @property
    def failure_code(self) -> str | None:
        """Its code, where there is one."""
        told = self._told()
        return (told[0] or None) if told else None

    def _told(self) -> tuple[str, str] | None:
        path = self.directory / "failure"
        if not path.exists():
            return None
        code, _, text = path.read_text().partition("\n")
        return code, text

    def _write(self, path: Path, text: str) -> None:
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(text)
        draft.rename(path)
