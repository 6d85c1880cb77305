"""Decides whose line is next, so that completion windows are met, priorities hold and no job starves.

It is pure: the time and the pace of the service are arguments. The service's rate is the measured rate at which lines
are answered. The rule:

1. The need of a job is the rate that it needs to meet its window: its lines that are not started yet, over the time
   left to start them, with a safety factor of 1.25. That time ends with the window, less the time that a line started
   now takes. As a share of the service, the need is this rate over the service's rate.
2. Needs are granted in the order of the ends of windows, up to 90 % of the service together. If that is too little for
   all windows, jobs of the lowest priority (of equals, those with the latest window) are granted nothing, and have
   only the share of their priority. So has a job that cannot meet its window even with the whole 90 %, and so has
   every job while the pace is unknown.
3. Each job has the larger of its need and of the share of its priority, which is in proportion to the priority. Jobs of
   equal priority that need no more have equal shares. At least a tenth of the service is divided by priority.
4. No job starves: a job that has had no line for a minute is next, with one line. With so many jobs that this would
   take more than a tenth of the service, the wait is longer: ten times what the service takes for a line of each.

At each moment each job has had its share, to within a burst of 16 lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from sgl_batch.errors import RequestError

DEFAULT_PRIORITY = 1
MAX_PRIORITY = 100
SAFETY = 1.25
MOST_RESERVED = 0.9
STARVES_AFTER_S = 60.0
MOST_FOR_STARVING = 0.1
BURST_LINES = 16  # of one job, before the choice is made again
_WINDOW = re.compile(r"([1-9]\d{0,5})([mhd])", re.ASCII)
_UNIT_S = {"m": 60, "h": 3600, "d": 86400}


@dataclass(slots=True, kw_only=True)
class JobShare:
    """What the decision knows of one job.

    `num_left`: lines that are not started yet. `fed_at`: when its last line started, or the job began to run. It and
    `deadline`, the end of the window, are in seconds of the caller's clock. `credit`: lines that its share entitles it
    to and that have not started.
    """

    order: int  # of creation
    weight: int
    deadline: float
    num_left: int = 0
    fed_at: float = 0.0
    credit: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast lines of all jobs are answered (None: unknown), and how long a line that starts now takes."""

    lines_per_s: float | None = None
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The job whose lines are next, and the share of the service that each job has now (their sum is 1)."""

    share: JobShare
    most_lines: int
    parts: Sequence[tuple[JobShare, float]]


def next_turn(shares: Iterable[JobShare], now: float, pace: Pace) -> Turn | None:
    """Decide the next turn among `shares`, jobs that have a line ready. Jobs past their window get nothing."""
    running = [one for one in shares if one.deadline > now]
    if not running:
        return None
    parts = list(zip(running, _parts(running, now, pace), strict=True))
    longest = min(running, key=lambda one: (one.fed_at, one.order))
    if now - longest.fed_at >= _starves_after_s(len(running), pace):
        return Turn(share=longest, most_lines=1, parts=parts)
    best, _ = max(parts, key=lambda one: (one[0].credit + one[1], -one[0].order))
    return Turn(share=best, most_lines=BURST_LINES, parts=parts)


def charge(turn: Turn, num_lines: int, now: float) -> None:
    """Account for the lines that the job whose turn it was has started."""
    for share, part in turn.parts:
        share.credit += num_lines * part
    turn.share.credit -= num_lines
    turn.share.fed_at = now


def join(share: JobShare, others: Iterable[JobShare], now: float) -> None:
    """Let a job begin with the mean credit of the others: it does not catch up on lines from before its start."""
    credits = [one.credit for one in others]
    share.credit = sum(credits) / len(credits) if credits else 0.0
    share.fed_at = now


def _starves_after_s(num_jobs: int, pace: Pace) -> float:
    if not pace.lines_per_s:
        return STARVES_AFTER_S
    return max(STARVES_AFTER_S, num_jobs / (MOST_FOR_STARVING * pace.lines_per_s))


def _parts(shares: Sequence[JobShare], now: float, pace: Pace) -> list[float]:
    """Return the share of each job: the larger of its need and of a common level times its weight. Their sum is 1."""
    needs = _needs(shares, now, pace)
    weights = [one.weight for one in shares]
    free_part, free_weight = 1.0, sum(weights)
    for index in sorted(range(len(shares)), key=lambda index: -needs[index] / weights[index]):
        if needs[index] * free_weight <= free_part * weights[index]:
            break
        free_part, free_weight = free_part - needs[index], free_weight - weights[index]
    level = free_part / free_weight
    return [max(need, level * weight) for need, weight in zip(needs, weights, strict=True)]


def _needs(shares: Sequence[JobShare], now: float, pace: Pace) -> list[float]:
    """Return the share of the service that each job is granted to meet its window."""
    needs = [0.0] * len(shares)
    if not pace.lines_per_s:
        return needs
    free = MOST_RESERVED
    for index in _meetable(shares, now + pace.delay_s, MOST_RESERVED * pace.lines_per_s):
        left_s = shares[index].deadline - now - pace.delay_s
        needs[index] = min(SAFETY * shares[index].num_left / (left_s * pace.lines_per_s), free)
        free -= needs[index]
    return needs


def _meetable(shares: Sequence[JobShare], start: float, lines_per_s: float) -> list[int]:
    """Return the jobs whose windows can all be met at this pace, by the end of the window (Moore and Hodgson)."""
    order = sorted(range(len(shares)), key=lambda index: (shares[index].deadline, shares[index].order))
    num_lines, accepted = 0, list[tuple[int, int]]()  # a heap by weight; of equal weights the latest window comes first
    for position, index in enumerate(order):
        most_lines = lines_per_s * (shares[index].deadline - start)
        if not 0 < shares[index].num_left <= most_lines:
            continue
        heappush(accepted, (shares[index].weight, -position))
        num_lines += shares[index].num_left
        while num_lines > most_lines:
            _, dropped = heappop(accepted)
            num_lines -= shares[order[-dropped]].num_left
    return [order[position] for position in sorted(-negative for _, negative in accepted)]


def window_s(window: str) -> int:
    """Return the seconds of a completion window. Raises RequestError."""
    match = _WINDOW.fullmatch(window)
    if match is None:
        raise RequestError(
            code="invalid_completion_window",
            message=f'completion_window is "{window[:80]}"; give minutes, hours or days as 30m, 24h or 7d',
            param="completion_window",
        )
    return int(match[1]) * _UNIT_S[match[2]]


def weight_of(metadata: Mapping[str, str] | None) -> int:
    """Return the job's weight: metadata["priority"], 1 to 100. Raises RequestError."""
    text = (metadata or {}).get("priority", str(DEFAULT_PRIORITY))
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= MAX_PRIORITY:
        raise RequestError(
            code="invalid_priority",
            message=f'metadata.priority is "{text[:80]}"; give a whole number from 1 to {MAX_PRIORITY}, a share: '
            "a job of priority 3 gets three lines where one of priority 1 gets one",
            param="metadata",
        )
    return int(text)
