"""A pool of one-part pages for tests of what is staged, and a store for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

PAGE, LAYERS, WIDTH, PAGES = 4, 5, 8, 9


@dataclass
class StagedPool:
    """Device pages of one part, [PAGES, PAGE, WIDTH] for each layer."""

    layer_num: int = LAYERS
    page_size: int = PAGE
    first_page: int = 0
    parts: list[tuple[torch.Tensor, ...]] = field(
        default_factory=lambda: [(torch.full((PAGES, PAGE, WIDTH), -1.0),) for _ in range(LAYERS)]
    )

    def page_parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.parts[layer]

    def redirect(self, parts, first_page: int) -> None:
        self.parts, self.first_page = list(parts), first_page
