"""Owns what a forward pass asks of memory through which KV goes, beside the pool's own pages. It moves nothing itself.

A part of a pass (decode rows, or prompts) may have a staging of its own. The pool's layers are its own pages except
between `redirect_pool` and `restore_pool`, and between `rows_wanted` and `rows_attended` of one sub-batch. So the
parts of one pass may have different stagings, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Staging(Protocol):
    """Brings KV or takes it away, layer by layer and sub-batch by sub-batch, in the order of layers and rows.

    Layers are counted from this process's first, sub-batches and rows within the part.
    """

    first_kv_index: int
    """The KV index of the first token in the memory to which KV is written."""

    @property
    def spans(self) -> Sequence[tuple[int, int]] | None:
        """The rows of each sub-batch of the coming pass, which cover every row once; None: as the plan cuts them."""

    def redirect_pool(self) -> None:
        """Lead the pool's layers to the memory, while the part's attention is planned."""

    def restore_pool(self) -> None:
        """Let the pool's layers be its own pages again."""

    def rows_wanted(self, layer: int, index: int) -> None:
        """Lead to where a sub-batch's attention is about to read and write in a layer, and have there what it reads."""

    def rows_attended(self, layer: int, index: int, end: int) -> None:
        """Lead back: the KV of a sub-batch, whose last row is `end` - 1, is written in a layer."""
