"""Owns reading a checkpoint's files into the page cache before its loader asks for them. It keeps no byte itself."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

# Large enough for a disk's full rate, and small enough that other reads, such as imports, wait milliseconds behind it.
PIECE_BYTES = 8 << 20
_INDEX = "model.safetensors.index.json"
_PATTERNS = ("*.safetensors", "*.bin", "*.pt")

ReadPiece = Callable[[int, int, int], None]
"""Takes an open file's descriptor, an offset and a number of bytes, and returns when these are in the page cache."""


def weight_files(model: Path) -> list[Path]:
    """Return the files from which a model's weights are loaded, in the loader's order; none where it has none.

    `model`: a directory, or a file that holds all weights. Where an index names safetensors files, a directory's others
    are not loaded.
    """
    if model.is_file():
        return [model]
    found = next((files for pattern in _PATTERNS if (files := sorted(model.glob(pattern)))), [])
    try:
        named = set(json.loads((model / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return found
    return [file for file in found if file.suffix != ".safetensors" or file.name in named]


def read_piece(descriptor: int, offset: int, num_bytes: int) -> None:
    """Read a piece into the page cache, and ask for the one behind it. Copies nothing to this process."""
    os.posix_fadvise(descriptor, offset + num_bytes, num_bytes, os.POSIX_FADV_WILLNEED)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        # The null device takes the cached pages themselves, and the call waits until they are read.
        while num_bytes > 0 and (sent := os.sendfile(null, descriptor, offset, num_bytes)):
            offset, num_bytes = offset + sent, num_bytes - sent
    finally:
        os.close(null)


class ReadAhead:
    """Reads files, one after the other, at most `most_bytes` of them, in a thread of its own while it is entered.

    Reading ahead is never needed: a file that cannot be read ends it, and the loader reports what is wrong. `to_read`,
    called in that thread, returns those of the files that are worth it.
    """

    def __init__(
        self,
        files: Sequence[Path],
        most_bytes: int,
        read: ReadPiece = read_piece,
        *,
        to_read: Callable[[Sequence[Path]], Sequence[Path]] = list,
    ) -> None:
        self._files, self._left, self._read, self._to_read = files, most_bytes, read, to_read
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self.run, name="read ahead", daemon=True)

    def __enter__(self) -> ReadAhead:
        if self._files and self._left > 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread, after the piece that it reads now: the process can then be forked."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join()

    def stop(self) -> None:
        """Read no further piece."""
        self._stopped.set()

    def run(self) -> None:
        """Read until all is read, or the limit, or a stop."""
        try:
            for file in self._to_read(self._files):
                self._read_file(file)
        except OSError as error:
            logger.debug("weights are not read ahead: %s", error)

    def _read_file(self, file: Path) -> None:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            for offset in range(0, size, PIECE_BYTES):
                num_bytes = min(PIECE_BYTES, size - offset, self._left)
                if num_bytes <= 0 or self._stopped.is_set():
                    return
                self._read(descriptor, offset, num_bytes)
                self._left -= num_bytes
        finally:
            os.close(descriptor)
