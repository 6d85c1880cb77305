"""Owns what an engine's time costs: as an amount, and for a million of the lines and tokens that it answered. Pure.

A price is for one instance for an hour, in any currency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sgl_batch.errors import ConfigError

PRICE_FLAG = "--price-per-hour"
_MILLION = 1e6
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTime:
    """Seconds of an engine, and the lines that it answered in them with the tokens of their prompts and outputs."""

    seconds: float = 0.0
    lines: float = 0
    input_tokens: float = 0
    output_tokens: float = 0

    def times(self, factor: float) -> EngineTime:
        """Return the time of `factor` times the lines, at the same rates."""
        return EngineTime(
            seconds=factor * self.seconds,
            lines=factor * self.lines,
            input_tokens=factor * self.input_tokens,
            output_tokens=factor * self.output_tokens,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON: counts are whole numbers."""
        counts = {name: round(value) for name, value in asdict(self).items()}
        return {**counts, "seconds": round(self.seconds, 3)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What an engine's time costs. A figure for a million is None where the time answered none.

    `per_million_tokens` counts the tokens of prompts and outputs together.
    """

    amount: float
    per_million_lines: float | None = None
    per_million_output_tokens: float | None = None
    per_million_tokens: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON, with six significant digits."""
        return {name: None if value is None else float(f"{value:.6g}") for name, value in asdict(self).items()}


def cost_of(time: EngineTime, price_per_hour: float, instances: int = 1) -> Cost:
    """Return what the time costs of `instances` instances that answer together."""
    amount = instances * price_per_hour * time.seconds / _HOUR_S

    def per_million(count: float) -> float | None:
        return _MILLION * amount / count if count else None

    return Cost(
        amount=amount,
        per_million_lines=per_million(time.lines),
        per_million_output_tokens=per_million(time.output_tokens),
        per_million_tokens=per_million(time.input_tokens + time.output_tokens),
    )


def job_cost(
    spent: Mapping[str, float], expected: Mapping[str, float] | None, price_per_hour: float, instances: int = 1
) -> dict[str, Any]:
    """Return a job's cost as JSON.

    Args:
        spent: The time that the job has had, as `EngineTime.as_dict` gives it.
        expected: The time of the whole job; None where it is not known, or the job is over.
        price_per_hour: The price of one instance for an hour.
        instances: The instances whose time it is.
    """

    def cost(of: Mapping[str, float]) -> dict[str, Any]:
        time = EngineTime(**{name: of[name] for name in EngineTime.__slots__})
        return cost_of(time, price_per_hour, instances).as_dict()

    whole = {} if expected is None else {"expected": cost(expected)}
    return {"price_per_hour": price_per_hour, **cost(spent), **whole}


def add_price_flag(parser: Any, effect: str) -> None:
    """Add the flag to a parser of argparse, or to a group of one. `effect`: what is shown with it."""
    text = f"price of the machine for an hour, in any currency; {effect}"
    parser.add_argument(PRICE_FLAG, metavar="N", help=text)


def parse_price(given: object) -> float | None:
    """Return the price of an hour that a flag or a config file gives; None without one. Raises ConfigError."""
    if given is None:
        return None
    try:
        price = float(str(given))
    except ValueError:
        price = math.nan
    if not 0 <= price < math.inf:
        raise ConfigError(
            f"{PRICE_FLAG} is {given!r}; it takes a number of at least 0, the price of one hour of the machine, as 2.5"
        )
    return price


def money(amount: float) -> str:
    """Return an amount with two decimals, or with three significant digits where it is below 1."""
    if amount >= 1 or amount <= 0:
        return f"{amount:,.2f}"
    return f"{amount:.{2 - math.floor(math.log10(amount))}f}"


def amount_text(cost: Mapping[str, Any]) -> str:
    """Return the amount of a job's cost in JSON, and of the whole job where it is known."""
    expected = cost.get("expected")
    whole = f" of about {money(expected['amount'])}" if expected else ""
    return f"{money(cost['amount'])}{whole}"


def per_million_text(cost: Mapping[str, Any]) -> str:
    """Return the figures for a million of a cost in JSON, as a line; empty without any."""
    names = {
        "per_million_lines": "lines",
        "per_million_output_tokens": "output tokens",
        "per_million_tokens": "prompt and output tokens",
    }
    known = [f"{text} {money(cost[name])}" for name, text in names.items() if cost.get(name) is not None]
    return f"a million {', '.join(known)}" if known else ""
