"""Decides which pages of prompts are the same: whole pages of tokens, compared one after the other from the first.

Who holds such a page is counted here; which prompts may share, and the copies, are the affair of others.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from sgl_batch.core.sequence import SequenceState

_UNKNOWN = -1


@dataclass(slots=True, kw_only=True, eq=False)
class PrefixPage:
    """One page of tokens behind its parent's. `kv_location`: where its KV lies, once that is known."""

    key: bytes
    parent: PrefixPage | None
    holders: int = 0
    kv_location: int = _UNKNOWN
    children: dict[bytes, PrefixPage] = field(default_factory=dict)

    @property
    def has_kv_location(self) -> bool:
        return self.kv_location != _UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """The full pages of a prompt, from its first on, that can be shared: the first `shared` of them others compute."""

    pages: tuple[PrefixPage, ...]
    shared: int

    @property
    def found(self) -> tuple[PrefixPage, ...]:
        """Pages that the prompt finds computed, or that are computed before its own rows."""
        return self.pages[: self.shared]

    @property
    def own(self) -> tuple[PrefixPage, ...]:
        """Pages that the prompt computes, for itself and whoever comes after it."""
        return self.pages[self.shared :]


NO_MATCH = PrefixMatch(pages=(), shared=0)


class PrefixTree:
    """Pages of the prompts that are alive, as a tree. A page lives as long as somebody holds it."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._root = PrefixPage(key=b"", parent=None)
        self._matches: dict[str, PrefixMatch] = {}
        self.num_pages = 0

    def invalidate(self) -> None:
        """Nobody finds a page any more that is there now; who holds it keeps it."""
        self._root = PrefixPage(key=b"", parent=None)

    def match_of(self, name: str) -> PrefixMatch:
        """The match of a sequence."""
        return self._matches.get(name, NO_MATCH)

    def match_and_insert(self, name: str, tokens: array[int], *, listed: bool = True) -> PrefixMatch:
        """Find a prompt's pages, as many as others have, and enter its others.

        Never all of a prompt is found: its last token has to be computed, and with it the page it is in.
        Without `listed` nothing is found, and nobody will find these pages but by `match_as`.
        """
        assert name not in self._matches, f"{name} holds pages already"
        pages = self._found(tokens) if listed else []
        shared, parent = len(pages), pages[-1] if pages else self._root
        for number in range(shared, len(tokens) // self.page_size):
            key = self._key(tokens, number)
            if listed and key in parent.children:
                break  # the page of the last token, which this prompt computes for itself alone
            page = PrefixPage(key=key, parent=parent)
            if listed:
                parent.children[key] = page
            pages.append(page)
            parent = page
        self.num_pages += len(pages) - shared
        return self._enter(name, PrefixMatch(pages=tuple(pages), shared=shared))

    def match_as(self, name: str, other: str, num_pages: int) -> PrefixMatch:
        """Let a sequence hold the first pages of another's, all of them found."""
        pages = self._matches[other].pages[:num_pages]
        assert name not in self._matches, f"{name} holds pages already"
        assert len(pages) == num_pages, f"{other} holds {len(pages)} pages, {num_pages} are asked for"
        return self._enter(name, PrefixMatch(pages=pages, shared=num_pages))

    def _enter(self, name: str, match: PrefixMatch) -> PrefixMatch:
        for page in match.pages:
            page.holders += 1
        self._matches[name] = match
        return match

    def _found(self, tokens: array[int]) -> list[PrefixPage]:
        pages, page = [], self._root
        for number in range((len(tokens) - 1) // self.page_size):
            known = page.children.get(self._key(tokens, number))
            if known is None:
                break
            pages.append(known)
            page = known
        return pages

    def _key(self, tokens: array[int], number: int) -> bytes:
        size = self.page_size
        return tokens[number * size : (number + 1) * size].tobytes()

    def release(self, name: str) -> tuple[PrefixPage, ...]:
        """A sequence has ended or left; returns the pages that nobody holds any more. Of one without pages, none."""
        match = self._matches.pop(name, None)
        if match is None:
            return ()
        dropped = []
        for page in match.pages:
            page.holders -= 1
            if page.holders == 0:
                dropped.append(page)
                if page.parent is not None and page.parent.children.get(page.key) is page:
                    del page.parent.children[page.key]
        self.num_pages -= len(dropped)
        return tuple(dropped)


def estimate_shared(queued: Iterable[tuple[SequenceState, array[int] | None]], tree: PrefixTree, *, rows: int) -> None:
    """Note of each queued sequence how many tokens it would share if it were prefilled with all those before it.

    A group is a head of the queue, so that this is what each of its members will share. It goes on until `rows` tokens
    to be computed are exceeded. None in place of a prompt's tokens: it shares nothing.
    """
    names, total = [], 0
    for sequence, tokens in queued:
        sequence.shared_tokens = 0
        if tokens is not None:
            sequence.shared_tokens = tree.match_and_insert(sequence.sequence_id, tokens).shared * tree.page_size
            names.append(sequence.sequence_id)
        total += sequence.prefill_rows
        if total > rows:
            break
    for name in names:
        tree.release(name)
