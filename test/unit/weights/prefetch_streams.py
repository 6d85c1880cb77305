"""Streams for tests without a GPU: copies are made as soon, or as late, as a stream may."""

from __future__ import annotations

import torch


class Stream:
    """Counts what is pinned, and copies.

    `late`: copies are made when the computing stream is held for them, and no sooner.
    """

    def __init__(self, *, late: bool) -> None:
        self._late, self._waiting = late, list[tuple[torch.Tensor, torch.Tensor]]()
        self._made = self.num_copies = 0
        self.pinned: set[int] = set()
        self.begun = False

    def pin(self, memory: torch.Tensor) -> None:
        self.pinned.add(memory.data_ptr())

    def unpin(self, memory: torch.Tensor) -> None:
        self.pinned.remove(memory.data_ptr())

    def begin(self) -> None:
        self.begun = True

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        assert self.begun, "a copy that does not wait may overwrite data that is being read"
        assert to.is_contiguous(), "one copy, not one for each row"
        assert source.is_contiguous(), "one copy, not one for each row"
        self.num_copies += 1
        self._waiting.append((to, source))
        if not self._late:
            self._make(len(self._waiting))

    def mark(self) -> int:
        self.begun = False
        return self._made + len(self._waiting)

    def compute_waits(self, mark: int) -> None:
        self._make(mark - self._made)

    def _make(self, count: int) -> None:
        for to, source in self._waiting[: max(0, count)]:
            to.copy_(source)
            self._made += 1
        del self._waiting[: max(0, count)]
