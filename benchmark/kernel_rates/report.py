"""Owns the figures of timed work: rates, shares of the ceilings, ratios to other code; as tables and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from comparison.figures import Spread, paired_ratios, spread
from comparison.report import table

from kernel_rates.attention_work import DECODE
from kernel_rates.memory_probe import EXCHANGE, EXCHANGES, PAGE_READ
from kernel_rates.product_work import PRODUCT, READ
from kernel_rates.work import Timed

OURS = "sgl_batch"
# What the machine does, beside which kernels are looked at.
LIMITS = (PRODUCT, READ, PAGE_READ, EXCHANGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The rates of the fastest way in each round; a multiply-add counts as two operations.

    Those of pages are there if attention was measured.
    """

    product_by: str
    flops_per_s: list[float]
    read_by: str
    bytes_per_s: list[float]
    pages_by: str | None = None
    page_bytes_per_s: list[float] | None = None


def ceilings_of(timed: Sequence[Timed]) -> Ceilings:
    """Return the ceilings of a run."""
    product, read = _fastest(timed, PRODUCT), _fastest(timed, READ)
    pages = _fastest(timed, PAGE_READ) if any(t.work.table == PAGE_READ for t in timed) else None
    return Ceilings(
        product_by=product.work.by,
        flops_per_s=[product.work.flops / seconds for seconds in product.seconds],
        read_by=read.work.by,
        bytes_per_s=_bytes_per_s(read),
        pages_by=pages and pages.work.by,
        page_bytes_per_s=pages and _bytes_per_s(pages),
    )


def _fastest(timed: Sequence[Timed], name: str) -> Timed:
    return min((t for t in timed if t.work.table == name), key=_median_s)


def _bytes_per_s(timed: Timed) -> list[float]:
    return [timed.work.num_bytes / seconds for seconds in timed.seconds]


def _median_s(timed: Timed) -> float:
    return _spread(timed.seconds).median


def _spread(values: Iterable[float]) -> Spread:
    found = spread(values)
    assert found is not None, "a measurement has at least one round"
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rates of one piece of work. `roofline` is the least time by both ceilings over its own time.

    `page_share` is there for what reads pages once.
    """

    table: str
    row: str
    by: str
    ms: Spread
    gflops: Spread
    product_share: Spread
    gbytes: Spread
    read_share: Spread
    roofline: Spread
    page_share: Spread | None
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
        page_share=_page_share(entry, ceilings),
        slower_than_ours=ratio,
    )


def _page_share(entry: Timed, ceilings: Ceilings) -> Spread | None:
    if entry.work.table != DECODE or ceilings.page_bytes_per_s is None:
        return None
    reached = zip(_bytes_per_s(entry), ceilings.page_bytes_per_s, strict=True)
    return _spread(own / most for own, most in reached)


def _percent(share: Spread) -> str:
    scaled = Spread(median=100 * share.median, low=100 * share.low, high=100 * share.high, count=share.count)
    return f"{scaled.text(0)} %"


def ceilings_text(rates: Sequence[Rates], ceilings: Ceilings) -> str:
    """Return the ceilings in Markdown, by each way in which they were measured."""
    rows = [(r.row, r.by, f"{r.gflops.text(0)} GFLOP/s") for r in rates if r.table == PRODUCT]
    rows += [(r.row, r.by, f"{r.gbytes.text(1)} GB/s") for r in rates if r.table in (READ, PAGE_READ)]
    rows += [(r.row, r.by, f"{_exchange_ns(r.ms).text(0)} ns") for r in rates if r.table == EXCHANGE]
    by = [ceilings.product_by, ceilings.read_by, *([ceilings.pages_by] if ceilings.pages_by else [])]
    end = f"The ceilings below are those of {', '.join(by[:-1])} and {by[-1]}."
    return f"{table(('ceiling', 'by', 'reached'), rows)}\n\n{end}"


def _exchange_ns(ms: Spread) -> Spread:
    """Return the time of a line's way from one core to the other."""
    ns = 1e6 / (2 * EXCHANGES)
    return Spread(median=ns * ms.median, low=ns * ms.low, high=ns * ms.high, count=ms.count)


def work_text(name: str, rates: Sequence[Rates]) -> str:
    """Return one table in Markdown: our rates by row, and the times of others relative to ours."""
    own = [r for r in rates if r.table == name and r.by == OURS]
    others = list(dict.fromkeys(r.by for r in rates if r.table == name and r.by != OURS))
    of_pages = any(r.page_share is not None for r in own)
    headings = ["", "ms", "GFLOP/s", "of product", "GB/s", "of read", *(["of page read"] if of_pages else [])]
    headings += ["of roofline", *(f"{by} takes" for by in others)]
    rows = []
    for rate in own:
        cells = [rate.row, rate.ms.text(3), rate.gflops.text(0), _percent(rate.product_share)]
        cells += [rate.gbytes.text(1), _percent(rate.read_share)]
        cells += [] if rate.page_share is None else [_percent(rate.page_share)]
        cells += [_percent(rate.roofline)]
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
