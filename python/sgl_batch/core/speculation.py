"""Decides which tokens a decode step drafts: what is likely to follow in a sequence, and how many drafts pay.

Theory of operation

A decode pass of few sequences is bound by reading weights, so that a few more rows cost little. Drafts use these rows:
a sequence's next tokens are guessed, and the pass computes a row at each guessed position as well. The token sampled in
a row is the sequence's own if all drafts before it are right, because a sample depends on its seed and position alone.
So drafts change the number of passes and no token.

A draft is what followed the last occurrence of the sequence's present end, in its prompt or its output (prompt lookup).
How often drafts were right is counted for each sequence and each length of the match, also in steps that drafted
nothing. What a row costs is measured. A step drafts as much as makes the expected tokens per second highest.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

LONGEST_MATCH = 4
MOST_ROWS = 16
"""The most rows of a pass with drafts. With as many, an expert has several rows, and rows begin to cost as much."""

# By length of the match: the share of right drafts that is assumed at first, as if so many drafts had shown it.
_PRIOR_RATES = (0.2, 0.4, 0.6, 0.7)
_PRIOR_DRAFTS = 2.0
_OLD_DRAFT = 0.9  # the weight of a draft relative to the next one
_WINS_BY = 1.06  # drafts are taken if they promise so many times the tokens per second; estimates err

Drafter = Callable[[Sequence[int], int], Sequence[int]]
"""Called with a sequence's tokens and the most drafts; returns the drafts, at most as many."""


class SuffixIndex:
    """Finds where the end of a sequence occurred before. A step costs a few look-ups, whatever the length."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._follows: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens of the sequence."""
        known = self.tokens
        for token in tokens:
            end = len(known)
            for length in range(1, min(LONGEST_MATCH, end) + 1):
                self._follows[tuple(known[end - length :])] = end
            known.append(token)

    def match(self) -> tuple[int, int]:
        """Return the length of the longest end that occurred before, and what position followed its last occurrence.

        (0, 0) if not even the last token occurred before.
        """
        end = len(self.tokens)
        for length in range(min(LONGEST_MATCH, end), 0, -1):
            found = self._follows.get(tuple(self.tokens[end - length :]))
            if found is not None:
                return length, found
        return 0, 0

    def draft(self, most: int) -> tuple[int, ...]:
        """Return up to `most` tokens that followed the last occurrence; what repeats is repeated as often as fits."""
        length, start = self.match()
        if not length:
            return ()
        period = len(self.tokens) - start
        return tuple(self.tokens[start + number % period] for number in range(most))


@dataclass(slots=True)
class _Score:
    """How many drafts were tried, and how many of them were right; older ones count less."""

    tried: float = 0.0
    right: float = 0.0

    def note(self, tried: int, right: int) -> None:
        for number in range(tried):
            self.tried = self.tried * _OLD_DRAFT + 1
            self.right = self.right * _OLD_DRAFT + (number < right)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Guessed next tokens of a sequence, and the share of such guesses that was right."""

    tokens: tuple[int, ...]
    rate: float


class SequenceDrafts:
    """Drafts the tokens of one sequence, and keeps how often they were right."""

    def __init__(self, drafter: Drafter | None = None, *, vocab_size: int = 1 << 62) -> None:
        """Draft by `drafter`, or by what followed earlier occurrences; no tokens from `vocab_size` on."""
        self._drafter, self._vocab_size = drafter, vocab_size
        self._index = SuffixIndex()
        self._scores = [_Score() for _ in range(LONGEST_MATCH)]
        self._last: tuple[int, tuple[int, ...]] = (0, ())

    @property
    def num_tokens(self) -> int:
        """The tokens of the sequence that are known here."""
        return len(self._index.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens of the sequence, and compare the last draft with them."""
        length, drafted = self._last
        if length and tokens:
            tried = min(len(drafted), len(tokens))
            right = num_right(drafted[:tried], tokens)
            self._scores[length - 1].note(min(right + 1, tried), right)
        self._last = (0, ())
        self._index.extend(tokens)

    def draft(self, most: int) -> Draft:
        """Return up to `most` drafts of the next tokens."""
        if self._drafter is not None:
            length, tokens = LONGEST_MATCH, tuple(self._drafter(self._index.tokens, most))[:most]
        else:
            length, tokens = self._index.match()[0], self._index.draft(most)
        tokens = tuple(takewhile(lambda token: 0 <= token < self._vocab_size, tokens))
        self._last = (length, tokens)
        return Draft(tokens=tokens, rate=self._rate(length))

    def _rate(self, length: int) -> float:
        if not length:
            return 0.0
        score, prior = self._scores[length - 1], _PRIOR_RATES[length - 1]
        return (score.right + prior * _PRIOR_DRAFTS) / (score.tried + _PRIOR_DRAFTS)


def num_right(drafted: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many of the drafts, from the first on, are the tokens."""
    number = 0
    for draft, token in zip(drafted, tokens, strict=False):
        if draft != token:
            break
        number += 1
    return number


class PassCost:
    """Seconds of a decode pass by its rows: a line through measured passes, of which older ones count less.

    The slope begins at an assumed share of a pass of one row, and returns to it while passes have the same number of
    rows: so drafts that did not pay are tried again later.
    """

    _OLD_PASS = 0.98
    _ASSUMED_ROW = 0.25  # of the seconds of a pass of one row
    _ASSUMED_WEIGHT = 4.0
    _MOST_ABOVE = 3.0  # of the line: a pass that another process held up counts no more

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_squared = self._rows_seconds = 0.0

    def note(self, rows: int, seconds: float) -> None:
        """Add a measured pass."""
        if self._weight:
            seconds = min(seconds, self._MOST_ABOVE * self.of(rows))
        old = self._OLD_PASS
        self._weight = self._weight * old + 1
        self._rows = self._rows * old + rows
        self._seconds = self._seconds * old + seconds
        self._rows_squared = self._rows_squared * old + rows * rows
        self._rows_seconds = self._rows_seconds * old + rows * seconds

    def of(self, rows: int) -> float:
        """Return the seconds of a pass of so many rows; in another unit before the first measured pass."""
        if not self._weight:
            return 1 + self._ASSUMED_ROW * (rows - 1)
        mean_rows, mean = self._rows / self._weight, self._seconds / self._weight
        variance = self._rows_squared - self._rows * mean_rows
        covariance = self._rows_seconds - self._rows * mean
        assumed = mean * self._ASSUMED_ROW / (1 + self._ASSUMED_ROW * (mean_rows - 1))
        slope = (covariance + self._ASSUMED_WEIGHT * assumed) / (variance + self._ASSUMED_WEIGHT)
        most = mean / mean_rows  # no row costs more than a pass of its own
        return mean + min(max(slope, 0.0), most) * (rows - mean_rows)


def num_drafts(drafts: Sequence[Draft], cost: PassCost | None, *, most_rows: int = MOST_ROWS) -> list[int]:
    """Return how many of each sequence's drafts a pass verifies.

    A pass has a row for each sequence, which always gives a token, and one for each draft. Draft number n of a sequence
    gives a token if it and those before it are right, with probability rate ** n. The drafts most likely to give a
    token come first; as many are taken as make tokens per second highest, if that is clearly more than without drafts.

    Args:
        drafts: of each sequence of the decode group; () for one that cannot take drafts.
        cost: the seconds of a pass by rows; None: take all drafts that `most_rows` allows.
        most_rows: the most rows of the pass.
    """
    taken, rows = [0] * len(drafts), len(drafts)
    best, tokens = list(taken), float(rows)
    rate = 0.0 if cost is None else _WINS_BY * tokens / cost.of(rows)
    ahead = [(-draft.rate, index) for index, draft in enumerate(drafts) if draft.tokens]
    heapq.heapify(ahead)
    while ahead and rows < most_rows:
        chance, index = heapq.heappop(ahead)
        taken[index] += 1
        rows, tokens = rows + 1, tokens - chance
        if taken[index] < len(drafts[index].tokens):
            heapq.heappush(ahead, (chance * drafts[index].rate, index))
        if cost is None:
            best = list(taken)
        elif tokens / cost.of(rows) > rate:
            best, rate = list(taken), tokens / cost.of(rows)
    return best


def most_drafts(*, position: int, page_size: int, tokens_left: int) -> int:
    """Return how many drafts a sequence can take in a pass.

    A draft's KV lies in the page of the token before it, which the sequence has. So no page is taken for a draft that
    may be wrong, and right drafts may pass a boundary, where pages are reserved for the next interval.

    Args:
        position: of the token that the pass computes in any case.
        page_size: tokens of a page.
        tokens_left: tokens that the sequence may still generate, with that of this step.
    """
    return max(0, min(page_size - 1 - position % page_size, tokens_left - 1))


def drafts_wanted(speculate: str) -> int | None:
    """Return the drafts of a sequence that an option allows, at most; 0 for `off`, None for `auto`."""
    return {"off": 0, "auto": None}[speculate] if speculate in ("off", "auto") else int(speculate)
