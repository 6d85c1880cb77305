"""Owns the rows of a group between the attention of its sub-batches and its expert calls."""

from __future__ import annotations

from typing import Protocol

import torch


def _copy_unless_there(rows: torch.Tensor, target: torch.Tensor) -> None:
    """Copy rows to their part of the buffer. A GPU's norms write in place, so that rows may lie there already."""
    if rows.data_ptr() != target.data_ptr():
        target.copy_(rows)


class Buffer(Protocol):
    """The rows that sub-batches yield in a layer, until the experts take them. Row 0 is the group's first.

    One buffer serves all layers of a forward pass: when every row is taken, it is empty for the next layer.
    """

    def put(self, span: tuple[int, int], hidden: torch.Tensor, residual: torch.Tensor) -> None:
        """Store the hidden states and residuals [rows, hidden] of a sub-batch's rows [start, end).

        The spans of a layer do not overlap and come in any order. The tensors may be kept without a copy: the caller
        does not write to them until their rows are taken.
        """

    def ready(self) -> int:
        """Return how many rows can be taken now."""

    def take(self, limit: int) -> tuple[tuple[int, int], torch.Tensor, torch.Tensor]:
        """Return the first ready rows that lie together, at most `limit`: their span, hidden states and residuals.

        The caller may use and overwrite them until the next layer's rows are put into the same span.
        """


class AccumulationBuffer:
    """A `Buffer` whose rows are ready when all rows of the group are there (BatchGen Algorithm 1, lines 7 and 8).

    A sub-batch that is the whole group passes through without a copy.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows, self._written, self._taken = num_rows, 0, 0
        self._spans: list[tuple[int, int]] = []
        self._hidden: torch.Tensor | None = None
        self._residual: torch.Tensor | None = None

    def put(self, span: tuple[int, int], hidden: torch.Tensor, residual: torch.Tensor) -> None:
        start, end = span
        if end - start == self._num_rows:
            assert not self._written, f"span {span} is all rows, and {self._written} are written"
            self._hidden, self._residual, self._written = hidden, residual, end
            return
        assert self._taken == 0, f"{self._num_rows - self._taken} rows of the layer before are not taken"
        assert all(end <= first or last <= start for first, last in self._spans), f"span {span} is written already"
        assert 0 <= start < end <= self._num_rows, f"span {span} is not of {self._num_rows} rows"
        if self._hidden is None or self._residual is None:
            shape = (self._num_rows, hidden.shape[-1])
            self._hidden, self._residual = hidden.new_empty(shape), residual.new_empty(shape)
        _copy_unless_there(residual, self._residual[start:end])
        _copy_unless_there(hidden, self._hidden[start:end])
        self._spans.append(span)
        self._written += end - start

    def ready(self) -> int:
        return self._num_rows - self._taken if self._written == self._num_rows else 0

    def take(self, limit: int) -> tuple[tuple[int, int], torch.Tensor, torch.Tensor]:
        assert self._written == self._num_rows, f"{self._written} of {self._num_rows} rows are written"
        hidden, residual = self._hidden, self._residual
        assert hidden is not None, "rows are written"
        assert residual is not None, "rows are written"
        start, end = self._taken, min(self._taken + limit, self._num_rows)
        self._taken = end
        if end == self._num_rows:
            self._written = self._taken = 0
            self._spans.clear()
        if start == 0 and end == self._num_rows:
            return (start, end), hidden, residual
        return (start, end), hidden[start:end], residual[start:end]
