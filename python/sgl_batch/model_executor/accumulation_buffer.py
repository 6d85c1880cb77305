"""Owns the rows of one group between its attention sub-batches and its expert calls."""

from __future__ import annotations

from typing import Protocol

import torch


def _bring(rows: torch.Tensor, place: torch.Tensor) -> None:
    """Copy rows to their place, unless that is where they are: norms of a GPU answer in the memory they are given."""
    if rows.data_ptr() != place.data_ptr():
        place.copy_(rows)


class Buffer(Protocol):
    """What sub-batches yield in a layer, until the experts take it. Rows are counted from the group's first.

    One buffer serves all layers of a forward pass: when every row was taken, it is empty for the next one.
    """

    def put(self, span: tuple[int, int], hidden: torch.Tensor, residual: torch.Tensor) -> None:
        """Checkpoint what a sub-batch yields, of rows [start, end): hidden states and residuals [rows, hidden].

        Spans of a layer do not meet, and come in any order.
        """

    def ready(self) -> int:
        """How many rows can be combined now."""

    def take(self, limit: int) -> tuple[tuple[int, int], torch.Tensor, torch.Tensor]:
        """Combine up to `limit` rows that lie together, the first that are ready: their span and what was put there.

        They are the taker's until the next layer's rows are put in their place.
        """


class AccumulationBuffer:
    """A `Buffer` that has rows ready when all of the group are there (BatchGen Algorithm 1, lines 7 and 8).

    A sub-batch that is the whole group is handed on as it is, without a copy.
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
        _bring(residual, self._residual[start:end])
        _bring(hidden, self._hidden[start:end])
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
