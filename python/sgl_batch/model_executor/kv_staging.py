"""Owns the contract of memory through which KV passes during a forward pass, beside the pool's own pages.

A part of a pass (decode rows, or prompts) may have a staging of its own. The pool's layers are the pool's own pages,
except between `redirect_pool` and `restore_pool`, and between `before_attention` and `after_attention` of one
sub-batch. So the parts of one pass may have different stagings, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Staging(Protocol):
    """Brings KV to the device or takes it away, layer by layer and sub-batch by sub-batch.

    The layer runner calls it in the order of layers and rows, from one thread. Layers are counted from this process's
    first; sub-batches and rows are counted within the part.
    """

    first_kv_index: int
    """The KV index of the first token in the memory to which KV is written."""

    @property
    def spans(self) -> Sequence[tuple[int, int]] | None:
        """The rows [start, end) of each sub-batch of the coming pass, which cover every row once.

        None where the plan cuts the rows.
        """

    def redirect_pool(self) -> None:
        """Let the pool's layers be the staging memory, while the attention metadata of the part is made."""

    def restore_pool(self) -> None:
        """Let the pool's layers be its own pages again."""

    def before_attention(self, layer: int, index: int) -> None:
        """Redirect the pool to the memory of a sub-batch in a layer, and return when the KV that it reads is there."""

    def after_attention(self, layer: int, index: int, end: int) -> None:
        """Restore the pool. A sub-batch has written its KV in a layer; `end` is its last row plus one."""
