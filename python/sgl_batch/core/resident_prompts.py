"""Owns the account of prompt pages on the device, each counted once for all sequences that hold it there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

Page = TypeVar("Page", bound=Hashable)


class ResidentPrompts(Generic[Page]):
    """Prompt pages on the device, each counted once, however many running or restored sequences hold it."""

    def __init__(self) -> None:
        self._pages: dict[str, Sequence[Page]] = {}
        self._holders: Counter[Page] = Counter()

    def __len__(self) -> int:
        return len(self._holders)

    def holdings(self) -> dict[str, Sequence[Page]]:
        """Return a copy of the pages by sequence."""
        return dict(self._pages)

    def copy(self) -> ResidentPrompts[Page]:
        """Return a copy, to try out changes on."""
        other = ResidentPrompts[Page]()
        other._pages, other._holders = dict(self._pages), Counter(self._holders)
        return other

    def lacking(self, pages: Sequence[Page]) -> list[Page]:
        """Return the pages of a prompt that no sequence has on the device."""
        return [page for page in pages if page not in self._holders]

    def enter(self, name: str, pages: Sequence[Page]) -> None:
        """Note that a sequence has its prompt's pages on the device."""
        assert name not in self._pages, f"{name} is on the device already"
        self._pages[name] = pages
        self._holders.update(pages)

    def leave(self, name: str) -> list[Page]:
        """Note that a sequence has left the device; return the pages that no sequence has there any more."""
        dropped = []
        for page in self._pages.pop(name, ()):
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                dropped.append(page)
        return dropped
