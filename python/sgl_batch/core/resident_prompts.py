"""Owns which pages of prompts are on the device, each counted once for all sequences that hold it there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

Page = TypeVar("Page", bound=Hashable)


class ResidentPrompts(Generic[Page]):
    """Pages of prompts on the device, each once, however many sequences have it that run or come back."""

    def __init__(self) -> None:
        self._pages: dict[str, Sequence[Page]] = {}
        self._holders: Counter[Page] = Counter()

    def __len__(self) -> int:
        return len(self._holders)

    def holdings(self) -> dict[str, Sequence[Page]]:
        """Pages by sequence; a copy."""
        return dict(self._pages)

    def copy(self) -> ResidentPrompts[Page]:
        """The same, to try what would be."""
        other = ResidentPrompts[Page]()
        other._pages, other._holders = dict(self._pages), Counter(self._holders)
        return other

    def lacking(self, pages: Sequence[Page]) -> list[Page]:
        """Those of a prompt's pages that nobody has on the device."""
        return [page for page in pages if page not in self._holders]

    def enter(self, name: str, pages: Sequence[Page]) -> None:
        """A sequence has its prompt's pages on the device from now on."""
        assert name not in self._pages, f"{name} is on the device already"
        self._pages[name] = pages
        self._holders.update(pages)

    def leave(self, name: str) -> list[Page]:
        """A sequence leaves the device; returns the pages that nobody has there any more."""
        dropped = []
        for page in self._pages.pop(name, ()):
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                dropped.append(page)
        return dropped
