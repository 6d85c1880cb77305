"""Owns the rows of one group between its attention sub-batches and its combined expert call."""

from __future__ import annotations

import torch


def bring(rows: torch.Tensor, place: torch.Tensor) -> None:
    """Copy rows to their place, unless that is where they are."""
    if rows.data_ptr() != place.data_ptr():
        place.copy_(rows)


class AccumulationBuffer:
    """Hidden states and residuals [rows, hidden] of a group, filled span by span (BatchGen Algorithm 1, line 7).

    One buffer serves all layers of a forward pass. A layer's attention sub-batches write disjoint spans; the
    group may be combined only when every row has been written, which `combined` checks.
    """

    def __init__(self, num_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.hidden = torch.empty(num_rows, hidden_size, dtype=dtype, device=device)
        self.residual = torch.empty(num_rows, hidden_size, dtype=dtype, device=device)
        self._written = 0

    @classmethod
    def over(cls, hidden: torch.Tensor, residual: torch.Tensor) -> AccumulationBuffer:
        """One whose memory is given: what a sub-batch has already written there stays where it is."""
        buffer = cls(0, hidden.shape[-1], hidden.dtype, hidden.device)
        buffer.hidden, buffer.residual = hidden, residual
        return buffer

    def write(self, span: tuple[int, int], hidden: torch.Tensor, residual: torch.Tensor) -> None:
        """Checkpoint what a sub-batch yields, at rows [start, end)."""
        start, end = span
        assert start == self._written, f"span starts at row {start}, but {self._written} rows are written"
        # In this order: a residual that begins with the hidden states may lie in their place.
        bring(residual, self.residual[start:end])
        bring(hidden, self.hidden[start:end])
        self._written = end

    def combined(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows of the group, and start anew for the next layer."""
        assert self._written == len(self.hidden), f"{self._written} of {len(self.hidden)} rows are written"
        self._written = 0
        return self.hidden, self.residual
