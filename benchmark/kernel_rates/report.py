"""Owns the figures of timed work: rates, shares of the ceilings, ratios to other code; as tables and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from comparison.figures import Spread, paired_ratios, spread
from comparison.report import table

from kernel_rates.product_work import PRODUCT, READ
from kernel_rates.work import Timed

OURS = "sgl_batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Return the rates of the fastest way in each round; a multiply-add counts as two operations."""

    product_by: str
    flops_per_s: list[float]
    read_by: str
    bytes_per_s: list[float]


def ceilings_of(timed: Sequence[Timed]) -> Ceilings:
    """Return the ceilings of a run."""
    product = min((t for t in timed if t.work.table == PRODUCT), key=_median_s)
    read = min((t for t in timed if t.work.table == READ), key=_median_s)
    return Ceilings(
        product_by=product.work.by,
        flops_per_s=[product.work.flops / seconds for seconds in product.seconds],
        read_by=read.work.by,
        bytes_per_s=[read.work.num_bytes / seconds for seconds in read.seconds],
    )


def _median_s(timed: Timed) -> float:
    return _spread(timed.seconds).median


def _spread(values: Iterable[float]) -> Spread:
    found = spread(values)
    assert found is not None, "a measurement has at least one round"
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rates of one piece of work. `roofline` is the least time by both ceilings over its own time."""

    table: str
    row: str
    by: str
    ms: Spread
    gflops: Spread
    product_share: Spread
    gbytes: Spread
    read_share: Spread
    roofline: Spread
    slower_than_ours: Spread | None


def rates_of(timed: Sequence[Timed], ceilings: Ceilings) -> list[Rates]:
    """Return the rates of every piece of work, with ratios paired by round."""
    ours = {(t.work.table, t.work.row): t for t in timed if t.work.by == OURS}
    return [_rates(entry, ours.get((entry.work.table, entry.work.row)), ceilings) for entry in timed]


def _rates(entry: Timed, ours: Timed | None, ceilings: Ceilings) -> Rates:
    work, seconds = entry.work, entry.seconds
    rounds = list(zip(seconds, ceilings.flops_per_s, ceilings.bytes_per_s, strict=True))
    ratio = None
    if ours is not None and ours is not entry:
        ratio = paired_ratios(dict(enumerate(seconds)), dict(enumerate(ours.seconds)))
    return Rates(
        table=work.table,
        row=work.row,
        by=work.by,
        ms=_spread(1e3 * s for s in seconds),
        gflops=_spread(work.flops / s / 1e9 for s in seconds),
        product_share=_spread(work.flops / s / most for s, most, _ in rounds),
        gbytes=_spread(work.num_bytes / s / 1e9 for s in seconds),
        read_share=_spread(work.num_bytes / s / most for s, _, most in rounds),
        roofline=_spread(max(work.flops / flops, work.num_bytes / read) / s for s, flops, read in rounds),
        slower_than_ours=ratio,
    )


def _percent(share: Spread) -> str:
    scaled = Spread(median=100 * share.median, low=100 * share.low, high=100 * share.high, count=share.count)
    return f"{scaled.text(0)} %"


def ceilings_text(rates: Sequence[Rates], ceilings: Ceilings) -> str:
    """Return the ceilings in Markdown, by each way in which they were measured."""
    rows = [(r.row, r.by, f"{r.gflops.text(0)} GFLOP/s") for r in rates if r.table == PRODUCT]
    rows += [(r.row, r.by, f"{r.gbytes.text(1)} GB/s") for r in rates if r.table == READ]
    end = f"The ceilings below are those of {ceilings.product_by} and {ceilings.read_by}."
    return f"{table(('ceiling', 'by', 'reached'), rows)}\n\n{end}"


def work_text(name: str, rates: Sequence[Rates]) -> str:
    """Return one table in Markdown: our rates by row, and the times of others relative to ours."""
    own = [r for r in rates if r.table == name and r.by == OURS]
    others = list(dict.fromkeys(r.by for r in rates if r.table == name and r.by != OURS))
    headings = ["", "ms", "GFLOP/s", "of product", "GB/s", "of read", "of roofline", *(f"{by} takes" for by in others)]
    rows = []
    for rate in own:
        cells = [rate.row, rate.ms.text(3), rate.gflops.text(0), _percent(rate.product_share)]
        cells += [rate.gbytes.text(1), _percent(rate.read_share), _percent(rate.roofline)]
        same_row = {r.by: r.slower_than_ours for r in rates if (r.table, r.row) == (name, rate.row)}
        cells += ["" if (ratio := same_row.get(by)) is None else f"{ratio.text(2)} x" for by in others]
        rows.append(cells)
    return f"{name}\n\n{table(headings, rows)}"


def as_json(rates: Sequence[Rates], timed: Sequence[Timed], ceilings: Ceilings) -> dict[str, Any]:
    """Return all figures, and the seconds of every round."""
    return {
        "ceilings": dataclasses.asdict(ceilings),
        "rates": [
            {**dataclasses.asdict(rate), "seconds": entry.seconds} for rate, entry in zip(rates, timed, strict=True)
        ],
    }
