"""Owns pieces of work, and their timing in alternating rounds. It knows no kernel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One timed call: `flops` and `num_bytes` are the least that any implementation needs.

    `table` and `row` say where its figures stand, `by` whose code it is.
    """

    table: str
    row: str
    by: str
    flops: float
    num_bytes: float
    run: Callable[[], object]


@dataclass(slots=True, kw_only=True)
class Timed:
    """The seconds of one call of a piece of work, by round."""

    work: Work
    seconds: list[float] = field(default_factory=list)


def measure(works: Sequence[Work], *, rounds: int, sample_s: float, say: Callable[[str], None]) -> list[Timed]:
    """Time every piece of work once in each round, as the mean of as many calls as take `sample_s`.

    A quarter as many come before, untimed: caches still hold what other work has left.
    """
    say(f"warming up {len(works)} pieces of work")
    calls = [max(1, round(sample_s / _warm_seconds(work))) for work in works]
    timed = [Timed(work=work) for work in works]
    for number in range(1, rounds + 1):
        begun = time.perf_counter()
        for entry, count in zip(timed, calls, strict=True):
            _seconds(entry.work, -(-count // 4))
            entry.seconds.append(_seconds(entry.work, count))
        say(f"round {number} of {rounds}: {time.perf_counter() - begun:.1f} s")
    return timed


def _warm_seconds(work: Work) -> float:
    """Time a second call: a first one may take many times as long, and a sample of few calls would show little else."""
    _seconds(work, 1)
    return max(_seconds(work, 1), 1e-7)


def _seconds(work: Work, count: int) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        work.run()
    return (time.perf_counter() - begun) / count
