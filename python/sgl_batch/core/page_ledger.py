"""Owns an account of pages: how many each sequence has reserved. Which pages these are, the page pool knows."""

from __future__ import annotations

from collections import Counter

from sgl_batch.core.sequence import SequenceState


def pages_for(tokens: int, page_size: int) -> int:
    """Return the number of pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


class PageLedger:
    """Reservations of pages by owner (a sequence id), and prompt pages that several sequences hold, counted once.

    Invariant after every call: free + reserved == limit, and neither is negative. A call that would break it is a fault
    of the caller and raises AssertionError; the caller asks `fits` first.

    Args:
        total_pages: pages of the tier that this account is of.
        page_size: tokens of a page.
        overflow_pages: pages of an exclusive store, to which whole sequences move that have no room on the device; 0
            without one. All of them but as many as the largest reservation count as well (core/exclusive says why), and
            no pages are shared.
    """

    def __init__(self, total_pages: int, page_size: int, *, overflow_pages: int = 0) -> None:
        self.total_pages, self.overflow_pages = total_pages, overflow_pages
        self.page_size = page_size
        self.prompt_pages = 0
        self._reserved: dict[str, int] = {}
        self._sum = 0
        self._num_of_size: Counter[int] = Counter()

    @property
    def reserved_pages(self) -> int:
        """Pages reserved by owners, and prompt pages."""
        return self.prompt_pages + self._sum

    @property
    def largest(self) -> int:
        """The largest reservation in pages; 0 without any."""
        return max(self._num_of_size, default=0)

    def limit(self, largest: int) -> int:
        """Return the most pages that can be reserved if the largest reservation has `largest` pages."""
        return self.total_pages + max(0, self.overflow_pages - largest)

    @property
    def free_pages(self) -> int:
        """Pages that a new owner can reserve, as long as it does not become the largest."""
        return self.limit(self.largest) - self.reserved_pages

    def fits(self, *pages: int) -> bool:
        """Return whether new owners, one for each number given, can reserve these pages together."""
        return self.reserved_pages + sum(pages) <= self.limit(max(self.largest, *pages))

    def reserve(self, owner: str, pages: int) -> None:
        """Reserve pages that fit for a new owner, until `release`."""
        assert owner not in self._reserved, f"{owner} holds a reservation already"
        assert self.fits(pages), f"{owner} wants {pages} pages, {self.free_pages} are free"
        self._set(owner, pages)

    def add_prompt_pages(self, pages: int) -> None:
        """Count more shared prompt pages, or fewer if negative: pages that no sequence holds any more."""
        assert pages <= self.free_pages, f"prompts want {pages} pages, {self.free_pages} are free"
        assert self.prompt_pages + pages >= 0, f"{-pages} pages of prompts are given back of {self.prompt_pages}"
        self.prompt_pages += pages

    def resize(self, owner: str, pages: int) -> None:
        """Change the number of pages that an owner holds; more pages must be free."""
        more = pages - self.held(owner)
        assert more <= self.free_pages, f"{owner} wants {more} pages more, {self.free_pages} are free"
        self._unset(owner)
        self._set(owner, pages)

    def release(self, owner: str) -> int:
        """Give back what `owner` holds and return the number of pages. Releasing twice is a fault."""
        assert owner in self._reserved, f"{owner} holds no reservation"
        return self._unset(owner)

    def _set(self, owner: str, pages: int) -> None:
        self._reserved[owner] = pages
        self._sum += pages
        self._num_of_size[pages] += 1

    def _unset(self, owner: str) -> int:
        pages = self._reserved.pop(owner)
        self._sum -= pages
        self._num_of_size[pages] -= 1
        if not self._num_of_size[pages]:
            del self._num_of_size[pages]
        return pages

    def held(self, owner: str) -> int:
        """Return the pages that an owner holds. An owner without a reservation is a fault."""
        assert owner in self._reserved, f"{owner} holds no reservation"
        return self._reserved[owner]

    def holds(self, owner: str) -> bool:
        """Return whether an owner has a reservation."""
        return owner in self._reserved

    def reservations(self) -> dict[str, int]:
        """Return a copy of the reservations: pages by owner."""
        return dict(self._reserved)

    def whole_pages(self, sequence: SequenceState) -> int:
        """Return the pages of a sequence that shares nothing, up to its last possible token."""
        return pages_for(sequence.total_tokens, self.page_size)

    def shared_pages(self, sequence: SequenceState) -> int:
        """Return the full pages of a prompt without its last token: those that choices of a request can share."""
        return (sequence.prompt_tokens - 1) // self.page_size

    def own_pages(self, sequence: SequenceState) -> int:
        """Return the pages that a choice needs for itself, without the shared ones."""
        shared = 0 if self.overflow_pages else self.shared_pages(sequence)
        return self.whole_pages(sequence) - shared
