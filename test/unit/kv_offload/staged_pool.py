"""A pool of one-part pages for tests of staging."""

from __future__ import annotations

import torch

PAGE, LAYERS, WIDTH, PAGES = 4, 5, 8, 9


class StagedPool:
    """Device pages of one part, [PAGES, PAGE, WIDTH] for each layer."""

    def __init__(self) -> None:
        self.layer_num, self.page_size, self.first_page = LAYERS, PAGE, 0
        self.all_parts = (torch.full((LAYERS * PAGES, PAGE, WIDTH), -1.0),)
        self.parts: list[tuple[torch.Tensor, ...]] = [(part,) for part in self.all_parts[0].split(PAGES)]

    def page_parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.parts[layer]

    def redirect(self, parts, first_page: int) -> None:
        self.parts, self.first_page = list(parts), first_page
