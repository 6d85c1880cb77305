"""Owns an account of pages: how many each sequence has reserved. Which pages these are, the page pool knows."""

from __future__ import annotations

from collections import Counter

from sgl_batch.core.admission_policy import RESERVE, AdmissionPolicy
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
        policy: how much of its need a sequence reserves when it is admitted. If reservations grow, the theory is in
            core/growth.
        pool_pages: pages of a store that several accounts share. What this one has of it is a lease (core/store_lease):
            its overflow pages, or without a store of that kind all its pages. 0 if it shares with no other.
        two_tiers: whether there is an exclusive store even if it has no overflow pages now.

    admits: whether new owners are admitted; a lease may forbid it. Owners that arrive from other ranks are not new.
    borrower: the owner that uses more than it has reserved; None if none does.
    stalled: owners that wait until their reservations can grow, with their arrivals.
    away: owners that have given way to others with all their KV, and hold nothing here until they come back.
    """

    def __init__(
        self,
        total_pages: int,
        page_size: int,
        *,
        overflow_pages: int = 0,
        policy: AdmissionPolicy = RESERVE,
        pool_pages: int = 0,
        two_tiers: bool = False,
    ) -> None:
        self.total_pages, self.overflow_pages, self.pool_pages = total_pages, overflow_pages, pool_pages
        self.page_size, self.policy = page_size, policy
        self.two_tiers, self.admits = two_tiers or overflow_pages > 0, True
        self.borrower: str | None = None
        self.stalled: dict[str, int] = {}
        self.away: set[str] = set()
        self.prompt_pages = 0
        self._reserved: dict[str, int] = {}
        self._sum = 0
        self._num_of_size: Counter[int] = Counter()
        self._whole: dict[str, int] = {}
        self._gaps: Counter[int] = Counter()

    @property
    def has_waiting(self) -> bool:
        """Whether admitted sequences wait for pages of this account, and so come before others."""
        return bool(self.stalled or self.away)

    @property
    def reserved_pages(self) -> int:
        """Pages reserved by owners, and prompt pages."""
        return self.prompt_pages + self._sum

    @property
    def largest(self) -> int:
        """The largest reservation in pages; 0 without any."""
        return max(self._num_of_size, default=0)

    @property
    def largest_gap(self) -> int:
        """The most pages that one owner can need beyond its reservation."""
        return max(self._gaps, default=0)

    def limit(self, largest: int, gap: int = 0) -> int:
        """Return the most pages that can be reserved if the largest reservation has `largest` pages.

        `gap`: the most pages by which a reservation is less than its owner's whole need.
        """
        return self.total_pages - gap + max(0, self.overflow_pages - largest)

    @property
    def most_pages(self) -> int:
        """The most pages that one owner can have: those of the whole pool, if the account leases all its pages."""
        return self.total_pages if self.two_tiers else max(self.total_pages, self.pool_pages)

    def most(self, largest: int, gap: int = 0) -> int:
        """Return what `limit` would be with a lease of the whole pool."""
        if not self.two_tiers:
            return self.most_pages - gap
        return self.total_pages - gap + max(0, max(self.overflow_pages, self.pool_pages) - largest)

    def lease(self, pages: int, *, admits: bool = True) -> None:
        """Set what the account has of the pool. It must suffice for what is reserved.

        `admits`: whether new owners are admitted until the next call.
        """
        if self.two_tiers:
            self.overflow_pages = pages
        else:
            self.total_pages = pages
        self.admits = admits
        assert self.free_pages >= 0, f"a lease of {pages} pages is {-self.free_pages} less than what is reserved"

    @property
    def least_lease(self) -> int:
        """The smallest lease that suffices for what is reserved."""
        if not self.two_tiers:
            return self.reserved_pages + self.largest_gap
        over = self.reserved_pages - self.total_pages
        return over + self.largest if over > 0 else 0

    @property
    def free_pages(self) -> int:
        """Pages that a new owner can reserve, as long as it has neither the largest reservation nor the largest gap."""
        return self.limit(self.largest, self.largest_gap) - self.reserved_pages

    def fits(self, *pages: int, gap: int = 0) -> bool:
        """Return whether new owners, one for each number given, can reserve these pages together.

        `gap`: the most pages by which one of them may grow beyond its number.
        """
        return self.has_room(sum(pages), largest=max(pages, default=0), gap=gap)

    def has_room(self, pages: int, *, largest: int, gap: int = 0) -> bool:
        """Return whether new owners can reserve these pages together, of which one takes `largest`; see `fits`."""
        limit = self.limit(max(self.largest, largest), max(self.largest_gap, gap))
        return self.reserved_pages + pages <= limit

    def reserve(self, owner: str, pages: int, *, whole: int | None = None) -> None:
        """Reserve pages that fit for a new owner, until `release`.

        `whole`: its whole need, to which the reservation may grow. It counts only if the policy lets reservations grow.
        """
        whole = whole if self.policy.grows else None
        gap = 0 if whole is None else whole - pages
        assert owner not in self._reserved, f"{owner} holds a reservation already"
        assert gap >= 0, f"{owner} reserves {pages} pages of {whole} that it can need"
        assert self.fits(pages, gap=gap), f"{owner} wants {pages} pages, {self.free_pages} are free"
        self._set(owner, pages, whole)

    def add_prompt_pages(self, pages: int) -> None:
        """Count more shared prompt pages, or fewer if negative: pages that no sequence holds any more."""
        assert pages <= self.free_pages, f"prompts want {pages} pages, {self.free_pages} are free"
        assert self.prompt_pages + pages >= 0, f"{-pages} pages of prompts are given back of {self.prompt_pages}"
        self.prompt_pages += pages

    def can_resize(self, owner: str, pages: int) -> bool:
        """Return whether an owner can hold `pages` instead of what it holds, at most its whole need."""
        whole, held = self._whole.get(owner), self._unset(owner)
        gap = 0 if whole is None else whole - pages
        fits = gap >= 0 and (pages <= held or self.fits(pages, gap=gap))
        self._set(owner, held, whole)
        return fits

    def resize(self, owner: str, pages: int) -> None:
        """Change the number of pages that an owner holds, which must fit. It borrows and waits no longer."""
        more = pages - self.held(owner)
        assert self.can_resize(owner, pages), f"{owner} wants {more} pages more, {self.free_pages} are free"
        whole = self._whole.get(owner)
        self._unset(owner)
        self._set(owner, pages, whole)
        self._settle(owner)

    def release(self, owner: str) -> int:
        """Give back what `owner` holds and return the number of pages. Releasing twice is a fault."""
        assert owner in self._reserved, f"{owner} holds no reservation"
        self._settle(owner)
        return self._unset(owner)

    def _set(self, owner: str, pages: int, whole: int | None) -> None:
        self._reserved[owner] = pages
        self._sum += pages
        self._num_of_size[pages] += 1
        if whole is not None:
            self._whole[owner] = whole
            self._gaps[whole - pages] += 1

    def _unset(self, owner: str) -> int:
        pages = self._reserved.pop(owner)
        self._sum -= pages
        _count_down(self._num_of_size, pages)
        whole = self._whole.pop(owner, None)
        if whole is not None:
            _count_down(self._gaps, whole - pages)
        return pages

    # Owners that wait, or use more than they have reserved.

    def stall(self, owner: str, arrival: int) -> None:
        """Note that an owner waits until its reservation can grow."""
        assert self.holds(owner), f"{owner} holds no reservation"
        self.stalled[owner] = arrival

    def lend(self, owner: str) -> None:
        """Let an owner grow to its whole need without a reservation. No other owner borrows."""
        assert self.borrower is None, f"{self.borrower} borrows, and {owner} cannot"
        assert self.holds(owner), f"{owner} holds no reservation"
        self._settle(owner)
        self.borrower = owner

    def leave(self, owner: str) -> None:
        """Release an owner that waits without pages of this account from now on, until `come_back`."""
        self.release(owner)
        self.away.add(owner)

    def come_back(self, owner: str) -> None:
        """Note that an owner that was away has its KV in pages of this account again, which it has reserved."""
        assert self.holds(owner), f"{owner} holds no reservation"
        self.away.remove(owner)

    def _settle(self, owner: str) -> None:
        self.stalled.pop(owner, None)
        if self.borrower == owner:
            self.borrower = None

    def whole_need(self, owner: str) -> int:
        """Return the pages that an owner can need in all."""
        return self._whole.get(owner, self.held(owner))

    def needs(self) -> dict[str, int]:
        """Return a copy of the whole needs that were given: pages by owner."""
        return dict(self._whole)

    def copy(self) -> PageLedger:
        """Return an equal account, in which to try what would be."""
        other = PageLedger(
            self.total_pages,
            self.page_size,
            overflow_pages=self.overflow_pages,
            policy=self.policy,
            pool_pages=self.pool_pages,
            two_tiers=self.two_tiers,
        )
        for owner, pages in self._reserved.items():
            other._set(owner, pages, self._whole.get(owner))
        other.prompt_pages, other.borrower, other.admits = self.prompt_pages, self.borrower, self.admits
        other.stalled, other.away = dict(self.stalled), set(self.away)
        return other

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
        return self.whole_pages(sequence) - self.pages_shared_by_choices(sequence)

    def pages_shared_by_choices(self, sequence: SequenceState) -> int:
        """Return the pages of a prompt that its choices share in this account."""
        return 0 if self.two_tiers else self.shared_pages(sequence)


def _count_down(counter: Counter[int], key: int) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
