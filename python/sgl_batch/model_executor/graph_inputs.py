"""Owns a decode group's inputs and output at fixed addresses, for graphs that were captured on them."""

from __future__ import annotations

import torch

from sgl_batch.sglang_adapter.forward import decode_batch_over
from sgl_batch.sglang_adapter.types.batches import ForwardBatch

# The tensors that a decode batch has for its sequences, and their values in padding rows: a token at position 0 that
# attends to one token, with KV index 0, in the page that is kept for padding.
_PADDING = {
    "input_ids": 0,
    "positions": 0,
    "out_cache_loc": 0,
    "req_pool_indices": 0,
    "seq_lens": 1,
    "orig_seq_lens": 1,
}


class GraphInputs:
    """The tensors of a decode batch, each for `most_rows` rows, and the pass's output `hidden` [most_rows,
    hidden_size].

    A captured graph reads and writes them, so they keep their memory for the life of this object.
    """

    def __init__(self, most_rows: int, forward_batch: ForwardBatch, hidden_size: int, dtype: torch.dtype) -> None:
        self.hidden = torch.zeros(most_rows, hidden_size, dtype=dtype, device=forward_batch.input_ids.device)
        self._of_batch = {
            name: torch.full_like(getattr(forward_batch, name)[:1], padding).repeat(most_rows)
            for name, padding in _PADDING.items()
        }

    @property
    def num_bytes(self) -> int:
        return sum(rows.nbytes for rows in (self.hidden, *self._of_batch.values()))

    def load(self, forward_batch: ForwardBatch, padded: int) -> None:
        """Copy a group's rows in, and fill the rows up to `padded` with padding."""
        num_rows = forward_batch.batch_size
        for name, padding in _PADDING.items():
            own = self._of_batch[name]
            own[:num_rows] = getattr(forward_batch, name)
            own[num_rows:padded].fill_(padding)

    def batch(self, forward_batch: ForwardBatch, padded: int) -> ForwardBatch:
        """Return a batch like this one over the first `padded` rows of this memory."""
        return decode_batch_over(forward_batch, {name: own[:padded] for name, own in self._of_batch.items()})
