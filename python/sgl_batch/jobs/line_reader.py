"""Reads an input file as raw lines, and counts and hashes it beforehand."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from sgl_batch.errors import ConfigError
from sgl_batch.jobs.scratch import storage_errors

UTF8_BOM = b"\xef\xbb\xbf"
SCAN_BLOCK_BYTES = 4 << 20
_LOOKED_AT = 100
_NOT_TEXT = {
    b"\x1f\x8b": "compressed with gzip; unpack it with `gunzip`",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it with `unzstd`",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"PAR1": "a Parquet file; `sgl-batch run` and `sgl-batch jobs submit` take it; here, convert it to JSONL",
    b"\xff\xfe": "UTF-16; convert it with `iconv -f UTF-16 -t UTF-8`",
    b"\xfe\xff": "UTF-16; convert it with `iconv -f UTF-16 -t UTF-8`",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InputScan:
    """What one pass over the input found. `num_lines` counts the lines that are not blank."""

    num_lines: int
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RawLine:
    """One line that is not blank. `data` is None where the line is longer than the limit."""

    index: int  # position among the lines that are not blank, from 0
    number: int  # line in the file as an editor counts, from 1
    data: bytes | None
    num_bytes: int
    offset: int = 0  # of its first byte in the file


@dataclass(frozen=True, slots=True, kw_only=True)
class LineStart:
    """Where reading begins: the first byte of a line. `index` counts the lines before it that are not blank."""

    offset: int
    index: int
    lines_before: int


def scan_input(path: Path) -> InputScan:
    """Count the request lines and hash the file, in blocks. Raises ConfigError where it is not JSONL text."""
    digest = hashlib.sha256()
    num_bytes = num_lines = 0
    line_has_text = False
    with path.open("rb") as file:
        _refuse_other_formats(path, file)
        _skip_bom(file, digest)
        while block := file.read(SCAN_BLOCK_BYTES):
            digest.update(block)
            head, *others = block.split(b"\n")
            line_has_text = line_has_text or bool(head.strip())
            for part in others:
                num_lines += line_has_text
                line_has_text = bool(part.strip())
        num_bytes = file.tell()
    return InputScan(num_lines=num_lines + line_has_text, num_bytes=num_bytes, sha256=digest.hexdigest())


def check_first_lines(path: Path, max_line_bytes: int) -> None:
    """Raise ConfigError where none of the first lines is a JSON object, so that the file is no JSONL at all.

    Single wrong lines pass: each gets its own error.
    """
    seen = 0
    for line in islice(read_lines(path, max_line_bytes), _LOOKED_AT):
        if line.data is None or _is_object(line.data):
            return
        seen += 1
    if seen:
        which = f"none of its first {seen:,} lines is" if seen > 1 else "its only line is not"
        raise ConfigError(
            f"the input {path} is not JSONL: {which} a JSON object; give one request a line, or a table (Parquet, "
            "Arrow, or a folder of Hugging Face datasets)"
        )


def _is_object(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False


def read_lines(path: Path, max_line_bytes: int, start: LineStart | None = None) -> Iterator[RawLine]:
    """Yield the lines that are not blank, with at most `max_line_bytes` of one line in memory.

    Raises StorageError when the file cannot be read to its end.
    """
    with storage_errors(f"reading the input {path}"), path.open("rb") as file:
        if start is None:
            _skip_bom(file)
            start = LineStart(offset=file.tell(), index=0, lines_before=0)
        file.seek(start.offset)
        offset, index, number = start.offset, start.index, start.lines_before
        # Two bytes beyond the limit: a line of exactly the limit still arrives whole with its CR LF.
        while chunk := file.readline(max_line_bytes + 2):
            number += 1
            data: bytes | None = chunk.rstrip(b"\r\n")
            num_bytes, has_text = len(chunk.rstrip(b"\r\n")), bool(chunk.strip())
            if num_bytes > max_line_bytes:
                rest_bytes, rest_has_text = (0, False) if chunk.endswith(b"\n") else _skip_rest_of_line(file)
                data, num_bytes, has_text = None, num_bytes + rest_bytes, has_text or rest_has_text
            if has_text:
                yield RawLine(index=index, number=number, data=data, num_bytes=num_bytes, offset=offset)
                index += 1
            offset = offset + len(chunk) if data is not None else file.tell()


def _skip_rest_of_line(file: BinaryIO) -> tuple[int, bool]:
    num_bytes, has_text = 0, False
    while chunk := file.readline(SCAN_BLOCK_BYTES):
        num_bytes += len(chunk.rstrip(b"\r\n"))
        has_text = has_text or bool(chunk.strip())
        if chunk.endswith(b"\n"):
            break
    return num_bytes, has_text


def _skip_bom(file: BinaryIO, digest: hashlib._Hash | None = None) -> None:
    start = file.read(len(UTF8_BOM))
    if start != UTF8_BOM:
        file.seek(0)
    elif digest is not None:
        digest.update(start)


def _refuse_other_formats(path: Path, file: BinaryIO) -> None:
    start = file.read(4)
    file.seek(0)
    for magic, what in _NOT_TEXT.items():
        if start.startswith(magic):
            raise ConfigError(f"the input {path} is not JSONL in UTF-8: it looks like {what} first")
