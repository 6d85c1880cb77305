"""Owns the report of an exception that ends a process of an engine, and the file that keeps its traceback.

The report goes to the engine's rendezvous and reaches the user as one error. SGLang would print a traceback and send
the program a signal.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch

from sgl_batch.distributed.rank_errors import RankError
from sgl_batch.distributed.rendezvous import Rendezvous
from sgl_batch.errors import BAD_USAGE, ConfigError, SglBatchError, StoreError
from sgl_batch.managers.rank_heartbeat import failure_text
from sgl_batch.sglang_adapter.faults import error_text

logger = logging.getLogger(__name__)

# A fault of this rank may follow from the end of another one. It waits this long for the report of a process that saw
# how the other one ended.
_AWAIT_REPORT_S = 1.0
_PREFIX = "sgl-batch-failure-"
_MOST_KEPT = 16
_OURS = ("sgl_batch", "sglang")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReporter:
    """Reports why the process called `name`, such as "the scheduler", ends. `is_rank`: it is one of several ranks."""

    rendezvous: Rendezvous
    name: str
    is_rank: bool = False

    def report(self, error: Exception) -> None:
        """Report to the engine's program why this process ends. The first report of any process counts."""
        if isinstance(error, RankError):
            # The processes that watch the other rank know best what is wrong with it.
            self.rendezvous.await_failure(_AWAIT_REPORT_S)
            self.rendezvous.report_failure(failure_text(error))
        elif isinstance(error, SglBatchError):
            code = error.code if isinstance(error, StoreError) else BAD_USAGE if isinstance(error, ConfigError) else ""
            self.rendezvous.report_failure(f"{self.name} failed: {error}" if self.is_rank else str(error), code=code)
        else:
            if self.is_rank:
                self.rendezvous.await_failure(_AWAIT_REPORT_S)
            self.rendezvous.report_failure(f"{self.name} failed: {fault_text(error)}", traceback=traceback_text(error))

    def end(self, error: Exception) -> NoReturn:
        """Report `error` and end this process at once: nothing in it can be saved."""
        try:
            self.report(error)
            logger.debug("%s ends", self.name, exc_info=error)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    @contextmanager
    def end_on_error(self) -> Iterator[None]:
        """Report an exception that is raised inside, and end this process."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (it is reported, and ends the process)
            self.end(error)


def fault_text(error: BaseException) -> str:
    """Return the type, message and source line of a fault, on one line; for a lack of memory, also the remedy."""
    text = f"{type(error).__name__}: {error_text(error)}{_source_line(error.__traceback__)}"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        text += "; lower --max-total-tokens, --mem-fraction-static or --device-memory, or stream the weights"
    return text


def traceback_text(error: BaseException) -> str:
    """Return the whole traceback."""
    return "".join(traceback.format_exception(error))


def keep_traceback(text: str, directory: Path | None) -> str:
    """Write a traceback to a file that only the user may read, and return a clause that names the file.

    The oldest such files are removed. `directory`: None is the directory of temporary files. The same traceback has the
    same file, so that an engine that fails again reports the same text. Return "" where nothing can be written.
    """
    directory = directory or Path(tempfile.gettempdir())
    path = directory / f"{_PREFIX}{hashlib.sha256(text.encode()).hexdigest()[:12]}.txt"
    with suppress(OSError):
        # Other users may write in that directory: no link of theirs is followed, and no file of theirs is written.
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with open(number, "w", encoding="utf-8") as file:
            if os.fstat(number).st_uid != os.geteuid():
                return ""
            file.truncate(0)
            file.write(text)
        own = [one for one in directory.glob(f"{_PREFIX}*.txt") if one.lstat().st_uid == os.geteuid()]
        for old in sorted(own, key=lambda one: one.lstat().st_mtime)[:-_MOST_KEPT]:
            old.unlink(missing_ok=True)
        return f"; its traceback is in {path}"
    return ""


def _source_line(trace: TracebackType | None) -> str:
    """Return the innermost frame of ours or SGLang's; where there is none, the innermost frame."""
    frames = [(Path(frame.filename).parts, frame.lineno) for frame in traceback.extract_tb(trace)]
    for parts, line in reversed(frames):
        roots = [index for index, part in enumerate(parts[:-1]) if part in _OURS]
        if roots:
            return f" ({'/'.join(parts[roots[-1] :])}:{line})"
    return f" ({frames[-1][0][-1]}:{frames[-1][1]})" if frames else ""
