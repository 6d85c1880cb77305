"""Applies a user's function of rows to whole blocks, so that columns that it hands on keep their types.

Ray's own `Dataset.map` infers types from the values of each block: an empty list has no type, so that a block whose
rows all failed would have another schema than the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
from ray.data.block import BlockAccessor

from sgl_batch.control_plane.data.row_requests import ERROR

logger = logging.getLogger(__name__)

Row = dict[str, Any]
UserFunction = Callable[[Row], Mapping[str, Any]]


def with_added(preprocess: UserFunction) -> Callable[[pa.Table], pa.Table]:
    """Return `preprocess` as a function of blocks. A row keeps its other columns, as in Ray's processors."""

    def add(row: Row) -> Row:
        return {**row, **preprocess(dict(row))}

    def preprocess_rows(block: pa.Table) -> pa.Table:
        return applied(add, block)

    return preprocess_rows


def with_error(postprocess: UserFunction) -> Callable[[pa.Table], pa.Table]:
    """Return `postprocess` as a function of blocks. All rows have a column for errors; no failed row ends the run.

    A failed row goes through `postprocess` like the others, with empty answers, so that all rows have its columns.
    Where it raises for a failed row, that row keeps the columns that it has.
    """

    def finish(row: Row) -> Row:
        error = row[ERROR]
        if not error:
            return {**postprocess(dict(row)), ERROR: error}
        try:
            return {**postprocess(dict(row)), ERROR: error}
        except Exception:
            logger.exception("postprocess raises for a row that has an error, and the row keeps its columns")
            return row

    def postprocess_rows(block: pa.Table) -> pa.Table:
        return applied(finish, block)

    return postprocess_rows


def applied(function: Callable[[Row], Row], block: pa.Table) -> pa.Table:
    """Return the block of the function's rows, one for each row of `block`.

    A column that hands on the values of one of the block's columns is that column. Ray converts the others.
    """
    rows = block.to_pylist()
    results = [function(row) for row in rows]
    names = list(dict.fromkeys(name for result in results for name in result))
    columns = {name: [result.get(name) for result in results] for name in names}
    made: dict[str, Any] = {name: _handed_on(name, values, rows, block) for name, values in columns.items()}
    new = {name: columns[name] for name, column in made.items() if column is None}
    converted = BlockAccessor.batch_to_arrow_block(new) if new else None
    for name in new:
        assert converted is not None, "there are new columns"
        made[name] = converted.column(name)
    return pa.table(made)


def _handed_on(name: str, values: Sequence[Any], rows: Sequence[Row], block: pa.Table) -> Any:
    """Return the block's column with these very values: the one of this name, or a list under another name."""
    others = [one for one in block.column_names if one != name and rows and isinstance(rows[0][one], list)]
    for source in (name, *others):
        if source in block.column_names and all(value is row[source] for value, row in zip(values, rows, strict=True)):
            return block.column(source)
    return None
