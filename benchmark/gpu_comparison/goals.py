"""Owns the goals of each comparison, and whether a measurement meets them. Pure; goals are for one H200."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from comparison.figures import Spread


class Kind(enum.Enum):
    """The kind of a goal: speed relative to the best stock, in the median or every round, or a share of a bound."""

    TIMES = "times stock, median"
    FLOOR = "times stock, every round"
    COPY_BOUND = "share of the host's copy rate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """At least `limit`."""

    kind: Kind
    limit: float

    def text(self) -> str:
        """Return the goal as text."""
        limit = f"{self.limit:.0%}" if self.kind is Kind.COPY_BOUND else f"{self.limit:.1f}x"
        return f"{limit} ({self.kind.value})"


GOALS: dict[str, tuple[Goal, ...]] = {
    "kv": (Goal(kind=Kind.TIMES, limit=1.3),),
    "tight": (Goal(kind=Kind.TIMES, limit=1.5),),
    "weights": (Goal(kind=Kind.TIMES, limit=3.0), Goal(kind=Kind.COPY_BOUND, limit=0.7)),
    "prefill": (Goal(kind=Kind.TIMES, limit=1.5),),
    "resident": (Goal(kind=Kind.FLOOR, limit=1.0),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The share of the bound that was reached, and the resource that sets the bound."""

    share: float
    resource: str

    def text(self) -> str:
        return f"{self.share:.0%} of the bound by {self.resource}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A goal and its measurement; `met` is None without a measurement, or if the goal is not for this scale."""

    goal: Goal
    measured: Spread | None
    met: bool | None
    text: str

    @property
    def found(self) -> str:
        """Return the measurement as text: median, and smallest to largest of the rounds."""
        if self.measured is None:
            return ""
        if self.goal.kind is not Kind.COPY_BOUND:
            return f"{self.measured.text(2)}x"
        return f"{self.measured.median:.0%} ({self.measured.low:.0%}-{self.measured.high:.0%})"


def judge(goal: Goal, measured: Spread | None, reached: Reached | None, *, is_tiny: bool, fault: str) -> Verdict:
    """Compare a measurement with a goal. `fault`: why nothing was measured. A tiny scale is not judged."""
    if measured is None:
        return Verdict(goal=goal, measured=None, met=None, text=fault)
    if is_tiny:
        return Verdict(goal=goal, measured=measured, met=None, text="not judged: a tiny scale")
    value = measured.low if goal.kind is Kind.FLOOR else measured.median
    if value >= goal.limit:
        return Verdict(goal=goal, measured=measured, met=True, text="met")
    why = "no bound is known" if reached is None else reached.text()
    return Verdict(goal=goal, measured=measured, met=False, text=f"missed: {why}")
