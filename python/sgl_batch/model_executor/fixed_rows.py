"""Owns the rows of a decode group at addresses that stay from pass to pass, for graphs that were captured on them."""

from __future__ import annotations

import torch

from sgl_batch.sglang_adapter.forward import decode_batch_over
from sgl_batch.sglang_adapter.types.batches import ForwardBatch

# What a decode batch has of each sequence, and what it says of one that is not there: a token at position 0 whose KV
# goes to slot 0, in the page that is kept for padding, and which attends to that alone.
_PADDING = {
    "input_ids": 0,
    "positions": 0,
    "out_cache_loc": 0,
    "req_pool_indices": 0,
    "seq_lens": 1,
    "orig_seq_lens": 1,
}


class FixedRows:
    """Hidden states and residuals [most_rows, hidden], and what a decode batch says of each row.

    The halves of a layer read and write them in place: one set serves all layers and all sub-batches of a pass.
    """

    def __init__(self, most_rows: int, hidden: torch.Tensor, forward_batch: ForwardBatch) -> None:
        self.hidden = hidden.new_zeros(most_rows, hidden.shape[-1])
        self.residual = torch.zeros_like(self.hidden)
        self._of_batch = {
            name: torch.full_like(getattr(forward_batch, name)[:1], padding).repeat(most_rows)
            for name, padding in _PADDING.items()
        }

    @property
    def num_bytes(self) -> int:
        return sum(rows.nbytes for rows in (self.hidden, self.residual, *self._of_batch.values()))

    def load(self, hidden: torch.Tensor, forward_batch: ForwardBatch, padded: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Take over a group's rows, and make those up to `padded` harmless; where the group's rows are here."""
        num_rows = len(hidden)
        self.hidden[:num_rows] = hidden
        for name, padding in _PADDING.items():
            own = self._of_batch[name]
            own[:num_rows] = getattr(forward_batch, name)
            own[num_rows:padded].fill_(padding)
        self.clear(num_rows, padded)
        return self.hidden[:num_rows], self.residual[:num_rows]

    def clear(self, start: int, end: int) -> None:
        """Make hidden states 0, which every layer's experts can be given, any number of times."""
        if start < end:
            self.hidden[start:end].zero_()

    def batch(self, forward_batch: ForwardBatch, start: int, rows: int) -> ForwardBatch:
        """A batch like this one over rows [start, start + rows)."""
        return decode_batch_over(
            forward_batch, {name: own[start : start + rows] for name, own in self._of_batch.items()}
        )
