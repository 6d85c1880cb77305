"""Owns the bars of the long tail: what is compared, what counts as met, and which resource limits it. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from comparison.figures import Spread, paired_ratios

# By case and round.
Seconds = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the cores of one rank do alone, and those of all ranks at once, in a round.

    Attributes:
        round: Its number.
        read: Bytes of weights read a second, by products of one row: alone, and all together.
        products: Operations a second, by products of many rows: alone, and all together.
    """

    round: int
    read: tuple[float, float]
    products: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar, and what was reached.

    Attributes:
        name: For people.
        wanted: The ratio.
        at_most: Whether the ratio is of times, and may be no more; else it is a speed-up, and must be no less.
        reached: The ratio of the rounds that have both sides; None if none has.
        resource: What limits it, as measured in the same rounds.
        limit: The ratio that the resource allows; None if it was not measured.
    """

    name: str
    wanted: float
    at_most: bool
    reached: Spread | None
    resource: str
    limit: float | None

    @property
    def met(self) -> bool | None:
        """Whether the median meets the bar; None if it was not measured."""
        if self.reached is None:
            return None
        return self.reached.median <= self.wanted if self.at_most else self.reached.median >= self.wanted

    @property
    def share(self) -> float | None:
        """How much of what the resource allows is reached; None if either was not measured."""
        if self.reached is None or self.limit is None:
            return None
        return self.limit / self.reached.median if self.at_most else self.reached.median / self.limit


def bars(seconds: Seconds, rates: Sequence[Rates], tokens_a_pass: Mapping[str, float]) -> list[Bar]:
    """Return all bars.

    Args:
        seconds: Of each case, by round.
        rates: Of the cores, by round.
        tokens_a_pass: By case, the tokens of a straggler that a decode pass gave on average.
    """
    one, drafts, partition, both = (_of(seconds, f"c {name}") for name in ("one rank", "drafts", "partition", "all"))
    d_one, d_partition = _of(seconds, "d one rank"), _of(seconds, "d partition")
    read, products = ratio(rates, "read"), ratio(rates, "products")
    return [
        _time("a: all, over separate", 1.10, _of(seconds, "a all"), bound("a", seconds), "separate engines"),
        _time(
            "b: all, over separate or longest", 1.25, _of(seconds, "b all"), bound("b", seconds), "separate or longest"
        ),
        _speed_up("c: one rank, over partition", 1.4, one, partition, "read of weights", read),
        _speed_up("c: one rank, over drafts", 1.3, one, drafts, "tokens a pass", tokens_a_pass.get("c drafts")),
        _speed_up("c: partition, over all", 1.3, partition, both, "tokens a pass", tokens_a_pass.get("c all")),
        _speed_up("d: one rank, over partition", 1.6, d_one, d_partition, "products", products),
    ]


def _of(seconds: Seconds, case: str) -> Mapping[int, float]:
    return seconds.get(case, {})


def bound(letter: str, seconds: Seconds) -> dict[int, float]:
    """Return the seconds that a and b are compared with, by round.

    a: separate engines. b: these, or the longest sequence partitioned if it takes longer; of rounds that have both.
    """
    separate = seconds.get(f"{letter} separate", {})
    if letter == "a":
        return dict(separate)
    alone = seconds.get("b longest", {})
    return {number: max(separate[number], alone[number]) for number in sorted(separate.keys() & alone.keys())}


def ratio(rates: Sequence[Rates], name: str) -> float | None:
    """Return what all cores do together over what those of one rank do alone, the median of the rounds."""
    found = [getattr(one, name)[1] / getattr(one, name)[0] for one in rates]
    return statistics.median(found) if found else None


def _time(name: str, wanted: float, ours: Mapping[int, float], theirs: Mapping[int, float], resource: str) -> Bar:
    reached = paired_ratios(ours, theirs)
    return Bar(name=name, wanted=wanted, at_most=True, reached=reached, resource=resource, limit=1.0)


def _speed_up(
    name: str,
    wanted: float,
    slower: Mapping[int, float],
    faster: Mapping[int, float],
    resource: str,
    limit: float | None,
) -> Bar:
    reached = paired_ratios(slower, faster)
    return Bar(name=name, wanted=wanted, at_most=False, reached=reached, resource=resource, limit=limit)
