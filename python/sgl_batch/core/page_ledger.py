"""Owns the account of device pages: who reserved how many. Which pages these are is the pool's affair."""

from __future__ import annotations

from collections import Counter

from sgl_batch.core.sequence import SequenceState


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


class PageLedger:
    """Reservations by sequence, and pages of prompts that several may hold, counted once.

    Invariant: free + reserved == total, never negative. `overflow_pages`: of a store to which whole sequences move that
    have no room here. All that it holds beside the largest sequence counts as well then (core/exclusive says why), and
    nothing is shared.
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
        return self.prompt_pages + self._sum

    @property
    def largest(self) -> int:
        """The largest reservation."""
        return max(self._num_of_size, default=0)

    def limit(self, largest: int) -> int:
        """The most pages that can be reserved where the largest reservation is this."""
        return self.total_pages + max(0, self.overflow_pages - largest)

    @property
    def free_pages(self) -> int:
        """How many more can be reserved by one that wants no more than the largest does."""
        return self.limit(self.largest) - self.reserved_pages

    def fits(self, *pages: int) -> bool:
        """Whether as many owners more can reserve so many pages."""
        return self.reserved_pages + sum(pages) <= self.limit(max(self.largest, *pages))

    def reserve(self, owner: str, pages: int) -> None:
        assert owner not in self._reserved, f"{owner} holds a reservation already"
        assert self.fits(pages), f"{owner} wants {pages} pages, {self.free_pages} are free"
        self._set(owner, pages)

    def add_prompt_pages(self, pages: int) -> None:
        """Pages of prompts that can be shared are held from now on, or, where negative, no longer by anybody."""
        assert pages <= self.free_pages, f"prompts want {pages} pages, {self.free_pages} are free"
        assert self.prompt_pages + pages >= 0, f"{-pages} pages of prompts are given back of {self.prompt_pages}"
        self.prompt_pages += pages

    def resize(self, owner: str, pages: int) -> None:
        """Let an owner hold more pages than it does, or fewer."""
        more = pages - self.held(owner)
        assert more <= self.free_pages, f"{owner} wants {more} pages more, {self.free_pages} are free"
        self._unset(owner)
        self._set(owner, pages)

    def release(self, owner: str) -> int:
        """Give back what `owner` holds; returns the pages. Releasing twice is a fault."""
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
        """Pages that an owner holds. One without a reservation is a fault."""
        assert owner in self._reserved, f"{owner} holds no reservation"
        return self._reserved[owner]

    def holds(self, owner: str) -> bool:
        return owner in self._reserved

    def reservations(self) -> dict[str, int]:
        """Pages by owner; a copy."""
        return dict(self._reserved)

    def whole_pages(self, sequence: SequenceState) -> int:
        """Pages for a sequence that shares nothing, up to its last possible token."""
        return pages_for(sequence.total_tokens, self.page_size)

    def shared_pages(self, sequence: SequenceState) -> int:
        """Full pages of a prompt, without its last token, which the choices of a request can share."""
        return (sequence.prompt_tokens - 1) // self.page_size

    def own_pages(self, sequence: SequenceState) -> int:
        """Pages of a choice beside the shared ones."""
        shared = 0 if self.overflow_pages else self.shared_pages(sequence)
        return self.whole_pages(sequence) - shared
