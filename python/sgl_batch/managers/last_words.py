"""Owns what a process of an engine says when an exception ends it, and where the whole of it is kept.

The exception is told at the engine's rendezvous and reaches the user as one error; SGLang would print a traceback and
send the program a signal.
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
from sgl_batch.sglang_adapter.faults import words_of

logger = logging.getLogger(__name__)

# So long a rank whose fault may be another's end waits for those that see how that one has ended.
_OTHERS_TELL_S = 1.0
_PREFIX = "sgl-batch-failure-"
_MOST_KEPT = 16
_OURS = ("sgl_batch", "sglang")


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWords:
    """What `name`, such as "the scheduler", says at its end. `is_rank`: one of several."""

    rendezvous: Rendezvous
    name: str
    is_rank: bool = False

    def report(self, error: Exception) -> None:
        """Tell the engine's program why this process ends. The first process to do so is heard."""
        if isinstance(error, RankError):
            # What is wrong with another rank is known best to those that watch it.
            self.rendezvous.await_failure(_OTHERS_TELL_S)
            self.rendezvous.report_failure(failure_text(error))
        elif isinstance(error, SglBatchError):
            code = error.code if isinstance(error, StoreError) else BAD_USAGE if isinstance(error, ConfigError) else ""
            self.rendezvous.report_failure(f"{self.name} failed: {error}" if self.is_rank else str(error), code=code)
        else:
            if self.is_rank:
                self.rendezvous.await_failure(_OTHERS_TELL_S)
            self.rendezvous.report_failure(f"{self.name} failed: {fault_text(error)}", traceback=traceback_text(error))

    def end(self, error: Exception) -> NoReturn:
        """Report and end this process, at once: nothing can be saved in it."""
        try:
            self.report(error)
            logger.debug("%s ends", self.name, exc_info=error)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """An exception inside ends this process so."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (it is told, and ends the process)
            self.end(error)


def fault_text(error: BaseException) -> str:
    """Type, message and place of a fault, on one line; of a lack of memory, what helps."""
    text = f"{type(error).__name__}: {words_of(error)}{_place(error.__traceback__)}"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        text += "; lower --max-total-tokens, --mem-fraction-static or --device-memory, or stream the weights"
    return text


def traceback_text(error: BaseException) -> str:
    """The whole traceback."""
    return "".join(traceback.format_exception(error))


def keep_traceback(text: str, directory: Path | None) -> str:
    """Write a traceback to a file of the user's own, and say where; the oldest such files go.

    `directory`: None is that of temporary files. The same traceback has the same file: an engine that fails again says
    the same words. Where nothing can be written, say nothing.
    """
    directory = directory or Path(tempfile.gettempdir())
    path = directory / f"{_PREFIX}{hashlib.sha256(text.encode()).hexdigest()[:12]}.txt"
    with suppress(OSError):
        # Others may write in that directory, too: no link of theirs is followed, and no file of theirs is written.
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


def _place(trace: TracebackType | None) -> str:
    """The innermost frame of ours or SGLang's; of a fault that none of them has met, the innermost."""
    frames = [(Path(frame.filename).parts, frame.lineno) for frame in traceback.extract_tb(trace)]
    for parts, line in reversed(frames):
        roots = [index for index, part in enumerate(parts[:-1]) if part in _OURS]
        if roots:
            return f" ({'/'.join(parts[roots[-1] :])}:{line})"
    return f" ({frames[-1][0][-1]}:{frames[-1][1]})" if frames else ""
