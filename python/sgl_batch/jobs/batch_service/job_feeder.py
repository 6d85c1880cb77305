"""Whose line is next: urgent jobs by deadline, the others in fair shares by weight. Pure: no clock, no files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sgl_batch.errors import RequestError

DEFAULT_PRIORITY = 1
MAX_PRIORITY = 100
_WINDOW = re.compile(r"([1-9]\d{0,5})([mhd])", re.ASCII)
_UNIT_S = {"m": 60, "h": 3600, "d": 86400}


@dataclass(slots=True, kw_only=True)
class FeedShare:
    """What the feeder knows of one job. `served`: lines it was given, divided by its weight."""

    order: int  # of creation
    weight: int
    deadline: float
    is_urgent: bool
    served: float = 0.0


def next_share(shares: Iterable[FeedShare], now: float) -> FeedShare | None:
    """The job whose line is next, of those that have one ready.

    Jobs with a window of minutes go first, the earliest deadline before the others; jobs past their deadline get
    nothing. Of the rest, the one that had the least for its weight; of equals, the oldest.
    """
    best: FeedShare | None = None
    for one in shares:
        if one.deadline > now and (best is None or _rank(one) < _rank(best)):
            best = one
    return best


def charge(share: FeedShare, num_lines: int) -> None:
    """These lines were given to the job."""
    share.served += num_lines / share.weight


def join(share: FeedShare, others: Iterable[FeedShare]) -> None:
    """A job that comes later does not get what the others had before it."""
    share.served = max(share.served, min((one.served for one in others), default=0.0))


def window_s(window: str) -> int:
    """The seconds of a completion window. Raises RequestError."""
    match = _WINDOW.fullmatch(window)
    if match is None:
        raise RequestError(
            code="invalid_completion_window",
            message=f'completion_window is "{window[:80]}"; give minutes, hours or days as 30m, 24h or 7d',
            param="completion_window",
        )
    return int(match[1]) * _UNIT_S[match[2]]


def is_urgent(window: str) -> bool:
    """Whether the window is given in minutes."""
    return window.endswith("m")


def weight_of(metadata: Mapping[str, str] | None) -> int:
    """The job's weight: metadata["priority"], 1 to 100. Raises RequestError."""
    text = (metadata or {}).get("priority", str(DEFAULT_PRIORITY))
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= MAX_PRIORITY:
        raise RequestError(
            code="invalid_priority",
            message=f'metadata.priority is "{text[:80]}"; give a whole number from 1 to {MAX_PRIORITY}, a share: '
            "a job of priority 3 gets three lines where one of priority 1 gets one",
            param="metadata",
        )
    return int(text)


def _rank(share: FeedShare) -> tuple[bool, float, int]:
    return (not share.is_urgent, share.deadline if share.is_urgent else share.served, share.order)
