"""Owns result lines that wait on disk until the results of all earlier lines are written, so that no kill loses them.

They lie beside the output, in files `.NAME.kept-0`, `.NAME.kept-1`, ... that only grow. A line of such a file is
`INDEX FAILED RESULT`: the index of the request line, 0 or 1, and the result line as the output is to have it. A later
line replaces an earlier one of the same index. Memory holds only where each result line lies: 8 bytes for each line
from the first that is not written to the last that is finished.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import BinaryIO

from sgl_batch.errors import ConfigError
from sgl_batch.file_run.line_file import LineFile
from sgl_batch.jobs.job_store.directory import sync_directory
from sgl_batch.jobs.scratch import storage_errors

FILE_BYTES = 32 << 20  # a file of this size is followed by another
_NONE = -1
_OFFSET_BITS = 40
_FORGET_AT_ONCE = 4096  # locations


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The result line of one request line, and whether it belongs in the error file."""

    index: int
    result_line: bytes
    failed: bool


@dataclass(slots=True, kw_only=True)
class _KeptFile:
    """One file. `writer` is None where an earlier run wrote it."""

    path: Path
    reader: BinaryIO
    writer: LineFile | None
    num_waiting: int = 0
    num_bytes: int = 0

    def close(self) -> None:
        self.reader.close()
        if self.writer is not None:
            self.writer.close()

    def discard(self) -> None:
        self.reader.close()
        (self.writer or LineFile(self.path)).discard()


class WaitingResults:
    """The result lines that wait for one output, by index. `sync` may be called from another thread."""

    def __init__(self, output: Path, *, file_bytes: int = FILE_BYTES) -> None:
        self.num_waiting = 0
        self._output = output
        self._file_bytes = file_bytes
        self._files: dict[int, _KeptFile] = {}
        self._current: _KeptFile | None = None
        self._next_number = 0
        self._done: list[int] = []  # files whose result lines are all in the output
        self._first = 0  # the index of the first location
        self._locations = array("q")  # of each index from there: number of the file and offset in it, or _NONE
        self._new_name = False

    def read_kept(self, total: int) -> None:
        """Read the files of an earlier run. A torn last line of a file counts as absent.

        Raises ConfigError for a line that a run over `total` lines cannot have written.
        """
        for number, path in sorted(kept_files(self._output)):
            self._next_number = number + 1
            with storage_errors(f"reading {path}"):
                self._files[number] = kept = _KeptFile(path=path, reader=path.open("rb"), writer=None)
                for line_number, line in enumerate(kept.reader, 1):
                    if not line.endswith(b"\n"):
                        break
                    index, failed, _ = _parse(line, path, line_number)
                    if index >= total or failed not in (0, 1):
                        raise _foreign(path, line_number)
                    self._set(index, number, kept.num_bytes)
                    kept.num_bytes += len(line)

    def put(self, finished: Finished) -> None:
        """Keep one result line. Raises StorageError; then it is not kept."""
        kept = self._current
        if kept is None or kept.num_bytes >= self._file_bytes:
            kept = self._begin_file()
        assert kept.writer is not None, "this run writes it"
        line = b"%d %d %s" % (finished.index, finished.failed, finished.result_line)
        kept.writer.append([line])
        self._set(finished.index, self._next_number - 1, kept.num_bytes)
        kept.num_bytes += len(line)

    def __contains__(self, index: int) -> bool:
        return self._location(index) != _NONE

    def get(self, index: int) -> Finished | None:
        """Return the result line at `index`, or None where it does not wait here."""
        location = self._location(index)
        if location == _NONE:
            return None
        kept = self._files[location >> _OFFSET_BITS]
        with storage_errors(f"reading {kept.path}"):
            kept.reader.seek(location & ((1 << _OFFSET_BITS) - 1))
            line = kept.reader.readline()
        found, failed, result_line = _parse(line, kept.path, None)
        assert found == index, f"{kept.path} has line {found} where line {index} was written"
        return Finished(index=index, result_line=result_line, failed=bool(failed))

    def path_of(self, index: int) -> Path:
        """Return the file in which the result line at `index` waits."""
        return self._files[self._location(index) >> _OFFSET_BITS].path

    def release(self, index: int) -> None:
        """Take the result line at `index` off the waiting ones. It stays on the disk at least until the next `sync`."""
        location = self._location(index)
        assert location != _NONE, f"line {index} does not wait"
        self._locations[index - self._first] = _NONE
        self._leave(location)

    def first_from(self, index: int) -> int:
        """Return the lowest waiting index. There is one, and none is before `index`."""
        return next(at for at in range(index, self._first + len(self._locations)) if at in self)

    def forget_before(self, index: int) -> None:
        """Forget the locations before `index`: no line there will wait any more."""
        num = index - self._first
        if num >= len(self._locations):
            self._locations = array("q")
            self._first = index
        elif num >= max(_FORGET_AT_ONCE, len(self._locations) // 2):
            del self._locations[:num]
            self._first = index

    def written_out(self) -> list[int]:
        """Return the files that `sync` may remove once the output, as it is now, is on the disk."""
        return list(self._done)

    def sync(self, written_out: list[int]) -> None:
        """Wait until the waiting lines are on the disk, and remove the files `written_out`."""
        for number in written_out:
            self._done.remove(number)
            self._remove(number)
        for kept in list(self._files.values()):
            if kept.writer is not None:
                kept.writer.sync()
        if self._new_name:
            self._new_name = False
            self._sync_names()

    def close(self) -> None:
        """Close the files, and leave them to a later run."""
        for kept in self._files.values():
            kept.close()
        self._files = {}

    def remove(self) -> None:
        """Close and remove all files. Their lines are in the output on the disk, or no longer wanted."""
        for number in tuple(self._files):
            self._remove(number)

    def remove_new(self) -> None:
        """Close all files, and remove those of this run."""
        for number, kept in tuple(self._files.items()):
            if kept.writer is not None:
                self._remove(number)
        self.close()

    def _begin_file(self) -> _KeptFile:
        path = self._output.with_name(f"{_prefix(self._output)}{self._next_number}")
        writer = LineFile(path)
        writer.create()
        with storage_errors(f"opening {path}"):
            reader = path.open("rb")
        before, self._current = self._current, _KeptFile(path=path, reader=reader, writer=writer)
        if before is not None and before.num_waiting == 0:
            self._done.append(self._next_number - 1)
        self._files[self._next_number] = self._current
        self._next_number += 1
        self._new_name = True
        return self._current

    def _set(self, index: int, number: int, offset: int) -> None:
        at = index - self._first
        assert at >= 0, f"line {index} is written"
        if at >= len(self._locations):
            self._locations.extend(repeat(_NONE, at + 1 - len(self._locations)))
        if (before := self._locations[at]) != _NONE:
            self._leave(before)
        self._locations[at] = number << _OFFSET_BITS | offset
        self._files[number].num_waiting += 1
        self.num_waiting += 1

    def _leave(self, location: int) -> None:
        self.num_waiting -= 1
        number = location >> _OFFSET_BITS
        kept = self._files[number]
        kept.num_waiting -= 1
        if kept.num_waiting == 0 and kept is not self._current:
            self._done.append(number)

    def _location(self, index: int) -> int:
        at = index - self._first
        return self._locations[at] if 0 <= at < len(self._locations) else _NONE

    def _remove(self, number: int) -> None:
        self._files.pop(number).discard()

    def _sync_names(self) -> None:
        with storage_errors(f"syncing {self._output.parent}"):
            sync_directory(self._output.parent)


def kept_files(output: Path) -> list[tuple[int, Path]]:
    """Return number and path of each file in which result lines of `output` wait."""
    pattern = re.compile(re.escape(_prefix(output)) + r"(\d+)")
    with storage_errors(f"looking for kept lines beside {output}"):
        found = [(pattern.fullmatch(path.name), path) for path in output.parent.iterdir()]
    return [(int(match[1]), path) for match, path in found if match is not None]


def forget_kept(output: Path) -> None:
    """Remove the waiting files of `output`."""
    for _, path in kept_files(output):
        LineFile(path).discard()


def _prefix(output: Path) -> str:
    return f".{output.name}.kept-"


def _parse(line: bytes, path: Path, number: int | None) -> tuple[int, int, bytes]:
    index, _, rest = line.partition(b" ")
    failed, _, result_line = rest.partition(b" ")
    if not index.isdigit() or not failed.isdigit():
        raise _foreign(path, number)
    return int(index), int(failed), result_line


def _foreign(path: Path, number: int | None) -> ConfigError:
    which = "a line" if number is None else f"line {number}"
    return ConfigError(
        f"{which} of {path} was not written by the run that is to be resumed; remove it, or start anew with --overwrite"
    )
