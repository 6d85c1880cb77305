"""Bounds logs and dumps of requests: the number and the size of files, and the memory of requests that wait for a dump.

The operator decides which requests are logged, and how much of each.
"""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler, TimedRotatingFileHandler
from pathlib import Path
from typing import NoReturn

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.errors import RequestError
from sgl_batch.sglang_adapter.types.messages import Answer, LoggingRequest

LOG_BYTES, LOG_FILES = 64 << 20, 4
DUMP_FILES, DUMP_BYTES = 16, 1 << 30
MOST_DUMPED_AT_ONCE = 10_000
WAITING_BYTES = 64 << 20  # of requests that wait to be dumped
LEVELS, FORMATS = range(4), ("text", "json")
_DUMP = re.compile(r"(crash_dump_)?\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d\.pkl")


class PrivateRotatingFile(RotatingFileHandler):
    """A log file that only its owner can read, because it holds prompts and answers."""

    def __init__(self, path: str) -> None:
        super().__init__(path, maxBytes=LOG_BYTES, backupCount=LOG_FILES - 1, encoding="utf-8", delay=True)

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=_private)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def bound_targets(targets: Iterable[logging.Logger]) -> list[str]:
    """Make loggers that write to files keep a few private files of bounded size; return the paths of these files.

    Handlers of streams stay as they are. SGLang makes an empty file that other users can read whenever it looks up a
    logger, also where the logger exists.
    """
    paths = []
    for target in targets:
        for handler in list(target.handlers):
            if isinstance(handler, TimedRotatingFileHandler):
                bounded = PrivateRotatingFile(handler.baseFilename)
                bounded.setFormatter(handler.formatter)
                target.removeHandler(handler)
                handler.close()
                target.addHandler(bounded)
        for handler in target.handlers:
            if isinstance(handler, PrivateRotatingFile):
                _make_private(Path(handler.baseFilename))
                paths.append(handler.baseFilename)
    return paths


def _make_private(log: Path) -> None:
    with suppress(FileNotFoundError):
        log.chmod(0o600)


def logs_text(paths: Sequence[str]) -> str:
    """Return the text, for a person, that says where requests are logged."""
    where = ", ".join(paths) or "standard output"
    bound = f", at most {LOG_FILES} files of {format_bytes(LOG_BYTES)} each" if paths else ""
    return f"{where}{bound}"


def check_logging(asked: LoggingRequest) -> None:
    """Refuse settings that cannot be carried out or whose files would not be bounded. Raises RequestError."""
    level, threshold = asked.log_requests_level, asked.dump_requests_threshold
    if level is not None and level not in LEVELS:
        _refuse("log_requests_level", f"log_requests_level is {level}; give {LEVELS[0]} to {LEVELS[-1]}")
    if asked.log_requests_format not in (None, *FORMATS):
        _refuse("log_requests_format", f"log_requests_format is {asked.log_requests_format!r}; give text or json")
    if asked.log_level is not None and not isinstance(logging.getLevelName(asked.log_level.upper()), int):
        _refuse("log_level", f"log_level is {asked.log_level!r}; give debug, info, warning, error or critical")
    if threshold is not None and not 1 <= threshold <= MOST_DUMPED_AT_ONCE:
        text = f"dump_requests_threshold is {threshold}; give 1 to {MOST_DUMPED_AT_ONCE:,}, the limit"
        _refuse("dump_requests_threshold", text)
    for field in ("dump_requests_folder", "crash_dump_folder"):
        if folder := getattr(asked, field):
            _check_folder(field, Path(folder))


def _check_folder(field: str, path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        _refuse(field, f"{field} {path} cannot be made: {error}; name another")
    if not os.access(path, os.W_OK | os.X_OK):
        _refuse(field, f"{field} {path} cannot be written; name another")


def remove_oldest_dumps(folder: Path) -> None:
    """Remove the oldest dumps of a folder, so that one more keeps within the limits of number and total size."""
    dumps = [path for path in folder.rglob("*.pkl") if _DUMP.fullmatch(path.name)]
    num_bytes = 0
    with suppress(FileNotFoundError):  # another process has removed one meanwhile: then there is room
        dumps.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for number, path in enumerate(dumps):
            num_bytes += path.stat().st_size
            if number + 1 >= DUMP_FILES or num_bytes > DUMP_BYTES - WAITING_BYTES:
                path.unlink()


class WaitingDumps:
    """The approximate size in bytes of each request that waits for a dump, oldest first."""

    def __init__(self) -> None:
        self._sizes: deque[int] = deque()
        self.num_bytes = 0

    def add(self, request: object, answer: Answer) -> None:
        """Add the size of one more request."""
        size = _about_bytes(request, answer)
        self._sizes.append(size)
        self.num_bytes += size

    def keep(self, number: int) -> None:
        """Forget all but the newest `number` requests."""
        while len(self._sizes) > number:
            self.num_bytes -= self._sizes.popleft()

    @property
    def are_too_large(self) -> bool:
        """Whether the requests must be dumped now, or the oldest dropped."""
        return self.num_bytes > WAITING_BYTES and bool(self._sizes)


def _about_bytes(request: object, answer: Answer) -> int:
    """Return about how many bytes Python's objects of the texts and tokens take; the rest counts as a constant."""
    texts = (getattr(request, "text", None), answer.get("text"))
    tokens = (getattr(request, "input_ids", None), answer.get("output_ids"))
    return 4096 + sum(len(one) for one in texts if one) + 32 * sum(len(one) for one in tokens if one)


def _refuse(param: str, message: str) -> NoReturn:
    raise RequestError(code="invalid_logging", message=message, param=param)
