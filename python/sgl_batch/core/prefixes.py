"""Decides which pages of prompts are the same: whole pages of tokens, compared in order from the first.

It counts how many sequences hold each page. Which prompts may share, and where pages are copied, is decided in
kv_offload/prompt_sharing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from sgl_batch.core.sequence import SequenceState

_UNKNOWN = -1


@dataclass(slots=True, kw_only=True, eq=False)
class PrefixPage:
    """One page of tokens that follows its parent's.

    key: its tokens, as bytes.
    holders: number of sequences that hold it.
    kv_location: number of the device page or store block with its KV, once it is known.
    """

    key: bytes
    parent: PrefixPage | None
    holders: int = 0
    kv_location: int = _UNKNOWN
    children: dict[bytes, PrefixPage] = field(default_factory=dict)

    @property
    def has_kv_location(self) -> bool:
        """Whether it is known where its KV lies."""
        return self.kv_location != _UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """The full pages of a prompt, from its first on, that can be shared.

    Earlier prompts compute the first `shared` of them.
    """

    pages: tuple[PrefixPage, ...]
    shared: int

    @property
    def found(self) -> tuple[PrefixPage, ...]:
        """Pages that are computed already, or are computed before the prompt's own rows."""
        return self.pages[: self.shared]

    @property
    def own(self) -> tuple[PrefixPage, ...]:
        """Pages that the prompt computes, for itself and for later prompts."""
        return self.pages[self.shared :]


NO_MATCH = PrefixMatch(pages=(), shared=0)


class PrefixTree:
    """The pages of prompts of living sequences, as a tree. A page lives as long as a sequence holds it."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._root = PrefixPage(key=b"", parent=None)
        self._matches: dict[str, PrefixMatch] = {}
        self.num_pages = 0

    def invalidate(self) -> None:
        """Let no later prompt find the present pages. Sequences that hold them keep them."""
        self._root = PrefixPage(key=b"", parent=None)

    def match_of(self, name: str) -> PrefixMatch:
        """Return the match of a sequence; NO_MATCH if it holds no pages."""
        return self._matches.get(name, NO_MATCH)

    def match_and_insert(self, name: str, tokens: array[int], *, listed: bool = True) -> PrefixMatch:
        """Find the pages of a prompt that other sequences hold, insert its other pages, and return the match.

        The sequence holds all of them until `release`. The page of a prompt's last token is never found, because that
        token has to be computed.

        `listed`: if false, no page is found, and later sequences find these pages only by `match_as`.
        """
        assert name not in self._matches, f"{name} holds pages already"
        pages = self._found(tokens) if listed else []
        shared, parent = len(pages), pages[-1] if pages else self._root
        for number in range(shared, len(tokens) // self.page_size):
            key = self._key(tokens, number)
            if listed and key in parent.children:
                break  # the page of the last token, which this prompt computes for itself
            page = PrefixPage(key=key, parent=parent)
            if listed:
                parent.children[key] = page
            pages.append(page)
            parent = page
        self.num_pages += len(pages) - shared
        return self._enter(name, PrefixMatch(pages=tuple(pages), shared=shared))

    def match_as(self, name: str, other: str, num_pages: int) -> PrefixMatch:
        """Let a sequence hold the first `num_pages` pages of another sequence, and return the match."""
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
        """Let a sequence hold no pages any more, and return those that no sequence holds now.

        A sequence that holds no pages may be released as well.
        """
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
    """Note in each queued sequence how many tokens it would share if it were prefilled with all those before it.

    A group is a head of the queue, so that this is what each of its members will share. The tree is unchanged
    afterwards.

    Args:
        queued: sequences in order, each with the tokens of its prompt, or None if the prompt shares nothing.
        tree: the pages of living sequences.
        rows: stop when the sequences have more than this number of tokens to compute.
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
