"""Converts between batches of Ray Data and rows: reads the columns of requests, adds the columns of answers.

The added columns have fixed types, so that blocks with and without failed rows have one schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from sgl_batch.control_plane.data.row_requests import (
    ERROR,
    GENERATED,
    INPUTS,
    NUM_GENERATED,
    NUM_INPUT,
    TEXT,
    RowAnswer,
)
from sgl_batch.errors import ConfigError

ADDED = pa.schema(
    [
        (TEXT, pa.string()),
        (GENERATED, pa.list_(pa.int64())),
        (NUM_INPUT, pa.int64()),
        (NUM_GENERATED, pa.int64()),
        (ERROR, pa.string()),
    ]
)


def rows_of(batch: Any) -> list[dict[str, Any]]:
    """Return the columns of requests, and an error of an earlier stage, for each row of a batch.

    Raises ConfigError for a batch that is neither a pyarrow.Table nor a dict of numpy arrays.
    """
    wanted = (*INPUTS, ERROR)
    if isinstance(batch, pa.Table):
        present = {name: batch.column(name).to_pylist() for name in wanted if name in batch.column_names}
        length = batch.num_rows
    elif isinstance(batch, Mapping):
        present = {name: [_plain(value) for value in batch[name]] for name in wanted if name in batch}
        length = len(next(iter(batch.values()), ()))
    else:
        raise ConfigError(
            f"a batch is of type {type(batch).__name__}; give map_batches batch_format='pyarrow' (or 'numpy')"
        )
    return [{name: _plain(values[index]) for name, values in present.items()} for index in range(length)]


def with_answers(batch: Any, answers: Sequence[RowAnswer]) -> Any:
    """Return the batch, of the same kind, with the columns of its answers; columns of these names are replaced."""
    columns: dict[str, list[Any]] = {
        TEXT: [answer.text for answer in answers],
        GENERATED: [answer.tokens for answer in answers],
        NUM_INPUT: [answer.num_input_tokens for answer in answers],
        NUM_GENERATED: [len(answer.tokens) for answer in answers],
        ERROR: [answer.error for answer in answers],
    }
    if not isinstance(batch, pa.Table):
        return {**batch, **{name: _as_numpy(name, values) for name, values in columns.items()}}
    for field in ADDED:
        array = pa.array(columns[field.name], type=field.type)
        if field.name in batch.column_names:
            batch = batch.set_column(batch.column_names.index(field.name), field, array)
        else:
            batch = batch.append_column(field, array)
    return batch


def _as_numpy(name: str, values: list[Any]) -> np.ndarray[Any, Any]:
    if name == GENERATED:
        arrays = np.empty(len(values), dtype=object)
        for index, value in enumerate(values):
            arrays[index] = np.array(value, dtype=np.int64)
        return arrays
    return np.array(values, dtype=np.int64 if name in (NUM_INPUT, NUM_GENERATED) else object)


def _plain(value: Any) -> Any:
    """Return a value without numpy's types, which Ray Data puts into rows, also inside lists and dicts."""
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
