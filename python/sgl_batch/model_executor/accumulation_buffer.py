"""Owns the rows of one group between its attention sub-batches and its combined expert call."""

from __future__ import annotations

import torch


class AccumulationBuffer:
    """Hidden states and residuals [rows, hidden] of a group, filled span by span (BatchGen Algorithm 1, line 7).

    One buffer serves all layers of a forward pass. A layer's attention sub-batches write disjoint spans; the
    group may be combined only when every row has been written, which `combined` checks.
    """

    def __init__(self, num_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.hidden = torch.empty(num_rows, hidden_size, dtype=dtype, device=device)
        self.residual = torch.empty(num_rows, hidden_size, dtype=dtype, device=device)
        self._written = 0

    def write(self, span: tuple[int, int], hidden: torch.Tensor, residual: torch.Tensor) -> None:
        """Checkpoint what a sub-batch yields, at rows [start, end)."""
        start, end = span
        assert start == self._written, f"span starts at row {start}, but {self._written} rows are written"
        self.hidden[start:end] = hidden
        self.residual[start:end] = residual
        self._written = end

    def combined(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows of the group, and start anew for the next layer."""
        assert self._written == len(self.hidden), f"{self._written} of {len(self.hidden)} rows are written"
        self._written = 0
        return self.hidden, self.residual
