"""Decides by predictions how much of a batch is done within a time: all of it, or so many requests of the same mix."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from sgl_batch.errors import ConfigError

_WRITTEN = re.compile(r"(\d+(?:\.\d+)?)\s?([smh])", re.ASCII)
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class WithinDeadline:
    """What is done within a deadline.

    Attributes:
        deadline_s: The time that there is.
        whole_s: The predicted seconds of the whole batch.
        count: The most requests that are done in time; all of them where the whole batch fits.
        count_s: The predicted seconds of these.
    """

    deadline_s: float
    whole_s: float
    count: int
    count_s: float

    @property
    def fits(self) -> bool:
        """Return whether the whole batch is done in time."""
        return self.whole_s <= self.deadline_s


def parse_deadline(text: str) -> float:
    """Return the seconds of a text such as 90s, 10m or 1.5h. Raises ConfigError for any other text."""
    return parse_time("--deadline", text)


def parse_time(flag: str, text: str) -> float:
    """Return the seconds that a flag's text says, as `parse_deadline` does."""
    found = _WRITTEN.fullmatch(text.strip())
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{flag} is {text!r}; it takes a time with its unit, more than 0: 90s, 10m or 1.5h")
    return seconds


def within_deadline(seconds_of: Callable[[int], float], count: int, deadline_s: float) -> WithinDeadline:
    """Return how many of `count` requests are done within `deadline_s`.

    `seconds_of`: predicts the seconds of so many requests with the same mix of lengths; it is called with 1 to `count`.
    More requests take longer, so that the number is found by halving. No number is returned whose time is too long.
    """
    whole_s = seconds_of(count)
    if whole_s <= deadline_s:
        return WithinDeadline(deadline_s=deadline_s, whole_s=whole_s, count=count, count_s=whole_s)
    fits, fits_s, too_many = 0, 0.0, count
    while too_many - fits > 1:
        tried = (fits + too_many) // 2
        seconds = seconds_of(tried)
        if seconds <= deadline_s:
            fits, fits_s = tried, seconds
        else:
            too_many = tried
    return WithinDeadline(deadline_s=deadline_s, whole_s=whole_s, count=fits, count_s=fits_s)
