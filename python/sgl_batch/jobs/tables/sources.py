"""Reads the rows of a table, a few at a time: Parquet, an Arrow file, a folder of Hugging Face `datasets`.

Only some rows of one row group are in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_batch.errors import ConfigError

ROWS_AT_ONCE = 256
_READ_BYTES = 1 << 20
_PARQUET, _ARROW_FILE, _ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
_STATE, _SPLITS = "state.json", "dataset_dict.json"
INSTALL = "pip install pyarrow (the extra `tables` of sgl-batch brings the version that is tested)"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableCell:
    """A value that exists and cannot be read."""

    reason: str

    def __str__(self) -> str:
        return f"unreadable: {self.reason}"


def is_table(path: Path) -> bool:
    """Return whether the path is a table and not a JSONL file, by its content."""
    if path.is_dir():
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(8).startswith((_PARQUET, _ARROW_FILE, _ARROW_STREAM))


def check_table(path: Path) -> None:
    """Raise ConfigError where pyarrow is missing, or a directory holds no table. The table is not opened."""
    need_pyarrow(f"the input {path} is a table, and reading it")
    _files_of(path)


def need_pyarrow(what: str) -> None:
    """Raise ConfigError, which says how to install it, where pyarrow is missing."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{what} needs pyarrow, which is not installed: {INSTALL}") from error


class Table:
    """One table in one or several files. Raises ConfigError for a file that is not a table, or cannot be read."""

    def __init__(self, path: Path) -> None:
        need_pyarrow(f"the input {path} is a table, and reading it")
        self.path = path
        self._files = _files_of(path)
        self.columns: tuple[str, ...] = self._columns()

    def rows(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield every row, in order, with these columns. A cell is a Python value or an UnreadableCell."""
        for file in self._files:
            with _faults(file):
                for batch in _batches(file, list(columns)):
                    yield from _rows(batch.select(list(columns)))

    def count_rows(self) -> int:
        """Return how many rows there are, by what the files say of themselves."""
        count = 0
        for file in self._files:
            with _faults(file):
                count += _rows_of(file)
        return count

    def _columns(self) -> tuple[str, ...]:
        found: dict[Path, tuple[str, ...]] = {}
        for file in self._files:
            with _faults(file):
                found[file] = _columns_of(file)
        first, *others = found
        for other in others:
            if set(found[other]) != set(found[first]):
                raise ConfigError(
                    f"{other} has the columns {', '.join(found[other])}, and {first} has {', '.join(found[first])}; "
                    "all files of a table have the same"
                )
        return found[first]


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if (path / _SPLITS).exists():
        splits = sorted(one.parent.name for one in path.glob(f"*/{_STATE}"))
        raise ConfigError(
            f"the dataset {path} has the splits {', '.join(splits)}; name one: {path / (splits or ['?'])[0]}"
        )
    if (path / _STATE).exists():
        with _faults(path / _STATE):
            state = json.loads((path / _STATE).read_text(encoding="utf-8"))
            found = [path / str(one["filename"]) for one in state["_data_files"]]
    else:
        found = sorted(path.glob("*.parquet"))
    if not found:
        raise ConfigError(
            f"{path} is a directory with neither a dataset ({_STATE}, as save_to_disk writes it) nor *.parquet in it"
        )
    return found


@contextmanager
def _faults(path: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as error:
        raise ConfigError(f"the table {path} cannot be read: {error}") from error


def _magic(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(8)


def _columns_of(path: Path) -> tuple[str, ...]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    magic = _magic(path)
    if magic.startswith(_PARQUET):
        return tuple(pq.read_schema(path).names)
    with pa.memory_map(str(path)) as source:
        opened = pa.ipc.open_file(source) if magic.startswith(_ARROW_FILE) else pa.ipc.open_stream(source)
        return tuple(opened.schema.names)


def _rows_of(path: Path) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    magic = _magic(path)
    if magic.startswith(_PARQUET):
        return int(pq.read_metadata(path).num_rows)
    with pa.memory_map(str(path)) as source:
        if not magic.startswith(_ARROW_FILE):
            return sum(batch.num_rows for batch in pa.ipc.open_stream(source))
        opened = pa.ipc.open_file(source)
        return sum(opened.get_batch(index).num_rows for index in range(opened.num_record_batches))


def _batches(path: Path, columns: list[str]) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    magic = _magic(path)
    if magic.startswith(_PARQUET):
        # Through a buffer: otherwise a row group's columns are read whole, and a file may be one row group.
        with pq.ParquetFile(path, buffer_size=_READ_BYTES, pre_buffer=False) as file:
            yield from file.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns, use_threads=False)
        return
    with pa.memory_map(str(path)) as source:
        if magic.startswith(_ARROW_FILE):
            opened = pa.ipc.open_file(source)
            batches: Iterator[Any] = (opened.get_batch(index) for index in range(opened.num_record_batches))
        else:
            batches = iter(pa.ipc.open_stream(source))
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                yield batch.slice(start, ROWS_AT_ONCE)


def _rows(batch: Any) -> Iterator[dict[str, Any]]:
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError):  # text that is not UTF-8, a time beyond Python's range: then cell by cell
        rows = [
            {name: _cell(column[index]) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
            for index in range(batch.num_rows)
        ]
    yield from rows


def _cell(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError) as error:
        return UnreadableCell(reason=str(error))
