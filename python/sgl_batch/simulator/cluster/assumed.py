"""Owns the form of a number that no document gives: its best guess, and how low and how high it may be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Holder = TypeVar("_Holder", bound="DataclassInstance")

ASSUMED = "assumed"
BEST, LOW, HIGH = "best", "low", "high"
ENDS = (LOW, HIGH)


@dataclass(frozen=True, slots=True)
class Assumed:
    """A number that is assumed: `low` <= `best` <= `high`, and `why` they are so."""

    best: float
    low: float
    high: float
    why: str = ""

    def __post_init__(self) -> None:
        assert self.low <= self.best <= self.high, f"{self.low} <= {self.best} <= {self.high} does not hold"

    def moved(self, end: str) -> Assumed:
        """Return the number with LOW or HIGH as its best guess."""
        return Assumed(best=self.low if end == LOW else self.high, low=self.low, high=self.high, why=self.why)


NOTHING = Assumed(0.0, 0.0, 0.0)


def read_assumed(entry: Mapping[str, Any] | float) -> Assumed:
    """Return a number of a data file, which is given with its ends, or is certain."""
    if isinstance(entry, Mapping):
        return Assumed(float(entry["best"]), float(entry["low"]), float(entry["high"]), str(entry["why"]))
    return Assumed(float(entry), float(entry), float(entry))


def assumed_of(holder: DataclassInstance) -> dict[str, Assumed]:
    """Return the assumed numbers of a dataclass, by field."""
    found = {field.name: getattr(holder, field.name) for field in fields(holder)}
    return {name: value for name, value in found.items() if isinstance(value, Assumed)}


def drawn(holder: _Holder, random: Random) -> _Holder:
    """Return a dataclass with each assumed number drawn between its ends, most often near its best guess."""
    changes: dict[str, Any] = {
        name: replace(value, best=random.triangular(value.low, value.high, value.best))
        for name, value in assumed_of(holder).items()
        if value.low < value.high
    }
    return replace(holder, **changes)


def variants(holder: _Holder) -> Iterator[tuple[str, str, _Holder]]:
    """Yield a dataclass with one assumed number at one of its ends each, with the number's name and LOW or HIGH."""
    for name, value in assumed_of(holder).items():
        for end in ENDS:
            changes: dict[str, Any] = {name: value.moved(end)}
            if changes[name].best != value.best:
                yield name, end, replace(holder, **changes)
