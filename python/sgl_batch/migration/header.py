"""Owns the written form of a sequence that moves, without its KV. The stores give its mappings their meaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec


class SequenceHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a rank needs to resume a sequence, except the bytes of its pages.

    `position` is the number of tokens whose KV the pages hold. `sampling` (the request's parameters) and `progress`
    (finish and penalty state, and other state that the store needs) hold plain data: None, bool, int, float, str,
    bytes, and lists and string-keyed dicts of these. Samples depend on `seed` and position alone, so that there is no
    generator to move.

    A page has one tensor for each layer and part; `page_shapes` gives the shapes of the parts (keys and values, say).
    Pages move whole, including their part past `position`. The receiver holds copies of the first `pages_there`;
    `num_pages` counts the others, which are sent. `store_blocks`: the blocks of the KV in a host store that both ranks
    share; then no page is sent. `leased`: the part of the sender's lease of that store which the sequence brings along,
    in blocks. `waits_since`: its turn among the sequences that wait, which it keeps. `as_tokens`: it moves without KV,
    which its receiver computes; the sender had that of `lost_tokens`.
    """

    sequence_id: str
    prompt_tokens: list[int]
    generated_tokens: list[int]
    seed: int | None
    sampling: dict[str, Any]
    progress: dict[str, Any]
    position: int
    num_pages: int
    num_layers: int
    page_shapes: tuple[tuple[int, ...], ...]
    page_dtype: str
    store_blocks: list[int] = []
    leased: int = 0
    waits_since: int | None = None
    pages_there: int = 0
    as_tokens: bool = False
    lost_tokens: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for values that no sequence can have. In a received message it becomes a decoding error."""
        written = len(self.prompt_tokens) + len(self.generated_tokens)
        if not 0 <= self.position <= written:
            raise ValueError(f"sequence {self.sequence_id}: position {self.position} of {written} tokens")
        if min(self.num_pages, self.pages_there) < 0 or self.num_layers < 1 or not self.page_shapes:
            raise ValueError(
                f"sequence {self.sequence_id}: {self.num_pages} pages of {self.num_layers} layers with parts "
                f"{self.page_shapes}; pages may not be negative, layers and parts not be missing"
            )
        if any(size < 1 for shape in self.page_shapes for size in shape):
            raise ValueError(f"sequence {self.sequence_id}: a page's sizes are positive, not {self.page_shapes}")

    @property
    def num_tensors(self) -> int:
        """The number of tensors of its pages."""
        return self.num_layers * len(self.page_shapes) * self.num_pages

    def tensor_shapes(self) -> Iterator[tuple[int, ...]]:
        """Yield the shapes of its tensors in the order in which they are sent: by layer, then part, then page."""
        for _ in range(self.num_layers):
            for shape in self.page_shapes:
                yield from (shape for _ in range(self.num_pages))
