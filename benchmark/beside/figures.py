"""Owns how two predictions are compared: seconds by module, their ratios, medians and ranges, and the tables of these.

Both name parts of a pass in their own words. They are compared by modules that both have: attention with its matrices,
experts with the router and shared experts, the exchange of rows and sums, and the rest. Where AIConfigurator gives the
longer of two of these alone, the two are one module.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from comparison.report import table

from beside.cases import Case, Pass
from sgl_batch.planner.layer_dag import EXCHANGE as OUR_EXCHANGE
from sgl_batch.simulator.cluster import costs as parts

ATTENTION, EXPERTS, EXCHANGE, BOTH, REST = "attention", "experts", "exchange", "experts and exchange", "rest"
WHOLE: Final = "whole pass"
_OURS: Final[Mapping[str, str]] = {
    parts.ATTENTION: ATTENTION,
    parts.MATRICES: ATTENTION,
    parts.EXPERTS: EXPERTS,
    parts.TILES: EXPERTS,
    parts.SKEW: EXPERTS,
    parts.SHARED: EXPERTS,
    parts.ROUTER: EXPERTS,
    OUR_EXCHANGE: EXCHANGE,
}
# Beginnings of names of AIConfigurator's operations, without the phase; the first that fits counts.
_THEIRS: Final = (
    ("moe_overlap", BOTH),
    ("moe_pre_dispatch", EXCHANGE),
    ("moe_post_dispatch", EXCHANGE),
    ("embedding_ar", EXCHANGE),
    ("tp_allreduce", EXCHANGE),
    ("p2p", EXCHANGE),
    ("moe", EXPERTS),
    ("shared", EXPERTS),
    ("router", EXPERTS),
    ("attention", ATTENTION),
    ("mla", ATTENTION),
    ("qkv", ATTENTION),
    ("proj", ATTENTION),
)
SECONDS: Final = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Seconds of one pass by module: AIConfigurator's, and ours with tables of kernels and by the roofline alone.

    `even`: AIConfigurator's with even choices of experts, where its default is a power law; empty without such tables.
    `measured`: the share of its seconds that it took from tables of measured kernels alone.
    """

    case: Case
    work: Pass
    theirs: Mapping[str, float]
    even: Mapping[str, float]
    ours: Mapping[str, float]
    roofline: Mapping[str, float]
    measured: float

    @property
    def by_tables(self) -> bool:
        """Return whether measured kernels count in ours."""
        return dict(self.ours) != dict(self.roofline)


def module_of(name: str) -> str:
    """Return the module of one of AIConfigurator's operations."""
    plain = name.removeprefix("context_").removeprefix("generation_")
    return next((module for begin, module in _THEIRS if plain.startswith(begin)), REST)


def their_modules(milliseconds: Mapping[str, float]) -> dict[str, float]:
    """Return seconds by module of milliseconds by operation."""
    found = defaultdict[str, float](float)
    for name, value in milliseconds.items():
        found[module_of(name)] += value * SECONDS
    return _together(found) if BOTH in found else dict(found)


def our_modules(seconds: Mapping[str, float], *, like: Mapping[str, float]) -> dict[str, float]:
    """Return seconds by module of seconds by part; `like`: another's, whose modules are to be had."""
    found = defaultdict[str, float](float)
    for name, value in seconds.items():
        found[_OURS.get(name, REST)] += value
    return _together(found) if BOTH in like else dict(found)


def _together(found: Mapping[str, float]) -> dict[str, float]:
    both = sum(found.get(module, 0.0) for module in (EXPERTS, EXCHANGE, BOTH))
    return {**{name: value for name, value in found.items() if name not in (EXPERTS, EXCHANGE)}, BOTH: both}


def ratio(ours: Mapping[str, float], theirs: Mapping[str, float], module: str = WHOLE) -> float | None:
    """Return our seconds divided by theirs, of a module or of the whole; None where one of them has none."""
    if module == WHOLE:
        above, below = sum(ours.values()), sum(theirs.values())
    else:
        above, below = ours.get(module, 0.0), theirs.get(module, 0.0)
    return above / below if above and below else None


def spread_text(values: Sequence[float]) -> str:
    """Return the median and the range of ratios; a dash where there are none."""
    if not values:
        return "-"
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def ratio_table(found: Sequence[Compared], groups: Sequence[str]) -> str:
    """Return a table of medians and ranges of our seconds divided by theirs, with a row for each group and phase.

    `groups`: what makes a group, of "module", "layout", "gpus", "gpu", "model" and "engine".
    """
    sorted_by: defaultdict[tuple[str, ...], list[tuple[float | None, ...]]] = defaultdict(list)
    for one in found:
        modules = [WHOLE, *one.theirs] if "module" in groups else [WHOLE]
        for module in modules:
            key = tuple(_of(one, module, group) for group in (*groups, "phase"))
            with_tables = ratio(one.ours, one.theirs, module) if one.by_tables else None
            plain, even = (ratio(one.roofline, theirs, module) for theirs in (one.theirs, one.even))
            sorted_by[key].append((with_tables, plain, even))
    rows = []
    for key, values in sorted(sorted_by.items()):
        columns = ([value for value in column if value is not None] for column in zip(*values, strict=True))
        rows.append([", ".join(key), str(len(values)), *(spread_text(column) for column in columns)])
    heading = ", ".join([*groups, "phase"])
    return table([heading, "passes", "with tables", "roofline", "roofline, even choices there"], rows)


def _of(one: Compared, module: str, group: str) -> str:
    if group == "module":
        return module
    return one.work.phase if group == "phase" else str(getattr(one.case, group))


def pass_table(found: Iterable[Compared]) -> str:
    """Return a table of passes with milliseconds and ratios."""
    rows = []
    for one in found:
        columns = (one.theirs, one.even, one.ours, one.roofline)
        milliseconds = [f"{sum(column.values()) / SECONDS:.1f}" for column in columns]
        last = [ratio(column, one.theirs) or 0.0 for column in (one.ours, one.roofline)]
        what = f"{one.work.phase} {one.work.count} x {one.work.length}"
        rows.append([one.case.text(), what, *milliseconds, *(f"{value:.2f}" for value in last), f"{one.measured:.0%}"])
    headings = ["case", "pass", "theirs ms", "even ms", "ours ms", "roofline ms", "ours / theirs", "roofline / theirs"]
    return table([*headings, "measured there"], rows)
