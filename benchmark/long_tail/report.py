"""Owns the report of the long tail: the tables of cases and bars, what was the same, the plot of idle time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from comparison.figures import Spread, paired_ratios, spread
from comparison.report import table

from long_tail.bars import Bar, Rates, bars, bound, ratio
from long_tail.cases import Case
from long_tail.record import Record
from long_tail.runs import Run, by_round, tokens_a_pass

NOTE = """\
Medians (smallest-largest) of the rounds, starts and warm-ups not counted. Ratios are paired by round. Over its base: of
a the separate engines, of b these or the longest sequence partitioned, whichever takes longer, of c and d one rank.
Idle: the share of a rank's time that it waits for other ranks or requests, by rank (of separate engines, by engine).
Tokens a pass: those that a decode pass gives a sequence, with right drafts. Share: how much is reached of what the
limiting resource, measured in the same rounds, allows."""
_PANEL_INCHES = (4.5, 1.5)
_PLOT_COLUMNS = 3


def text(record: Record, cases: Sequence[Case]) -> str:
    """Return the report, in Markdown."""
    seconds = by_round(record.runs)
    works = {case.name[0]: case.work.description for case in reversed(cases)}
    sections = [
        "\n".join(f"- {letter}: {works[letter]}" for letter in sorted(works)),
        case_table(record, cases),
        bar_table(bars(seconds, record.rates, tokens_a_pass(record.runs))),
        "\n".join([*_rate_lines(record.rates), *_oddities(record.runs)]),
        NOTE,
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def case_table(record: Record, cases: Sequence[Case]) -> str:
    """Return a row for each case that has runs."""
    seconds, rows = by_round(record.runs), []
    for case in cases:
        runs = record.of(case.name)
        if not runs:
            continue
        rows.append(
            [
                case.name,
                str(len(runs)),
                _text(spread(run.seconds for run in runs), 2),
                _text(paired_ratios(seconds[case.name], base(case.name, seconds)), 2),
                _by_rank(runs),
                f"{statistics.median(run.moves for run in runs):.0f}",
                f"{statistics.median(run.count('partitions') for run in runs):.0f}",
                f"{statistics.median(run.tokens_a_pass for run in runs):.2f}",
            ]
        )
    headings = ["case", "runs", "seconds", "over its base", "idle by rank", "moves", "partitions", "tokens a pass"]
    return table(headings, rows)


def base(case: str, seconds: Mapping[str, Mapping[int, float]]) -> Mapping[int, float]:
    """Return the seconds, by round, with which a case is compared."""
    letter = case[0]
    return bound(letter, seconds) if letter in "ab" else seconds.get(f"{letter} one rank", {})


def bar_table(found: Sequence[Bar]) -> str:
    """Return a row for each bar."""
    verdicts = {None: "not measured", True: "met", False: "missed"}
    rows = []
    for bar in found:
        sign = "at most" if bar.at_most else "at least"
        limit = "" if bar.limit is None else f"{bar.limit:.2f}"
        share = "" if bar.share is None else f"{bar.share:.0%}"
        rows.append(
            [
                bar.name,
                f"{sign} {bar.wanted:.2f}",
                _text(bar.reached, 2),
                verdicts[bar.met],
                bar.resource,
                limit,
                share,
            ]
        )
    return table(["bar", "wanted", "reached", "", "limiting resource", "allows", "share"], rows)


def _rate_lines(rates: Sequence[Rates]) -> list[str]:
    if not rates:
        return []
    lines = []
    for name, what, unit, scale in (
        ("read", "Weights read by products of one row", "GB/s", 1e9),
        ("products", "Products of many rows", "TFLOP/s", 1e12),
    ):
        alone, together = (_text(spread(getattr(one, name)[place] / scale for one in rates), 2) for place in (0, 1))
        lines.append(
            f"{what}: {alone} {unit} by the cores of one rank alone, {together} by all: {ratio(rates, name):.2f} x."
        )
    return lines


def _oddities(runs: Sequence[Run]) -> list[str]:
    """Return whether the tokens of each bar's cases are the same, and how busy the machine was."""
    said = []
    for letter in sorted({run.case[0] for run in runs}):
        found = {tuple(run.outputs) for run in runs if run.case[0] == letter and run.case != "b longest"}
        if found:
            same = "the same tokens" if len(found) == 1 else f"{len(found)} DIFFERENT sets of tokens"
            said.append(f"{letter}: {same} in all cases and rounds.")
    others = [run.cpus_of_others for run in runs]
    if others:
        said.append(f"Other programs kept {statistics.median(others):.1f} cores busy (at most {max(others):.1f}).")
    return said


def _by_rank(runs: Sequence[Run]) -> str:
    by_rank = zip(*([rank.idle for rank in run.ranks] for run in runs), strict=True)
    return ", ".join(f"{statistics.median(idle):.0%}" for idle in by_rank)


def _text(found: Spread | None, digits: int) -> str:
    return found.text(digits) if found else ""


def draw(record: Record, cases: Sequence[Case], target: Path) -> None:
    """Draw the idle share of each rank over the last run of each case. It takes matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    last = [runs[-1] for case in cases if (runs := record.of(case.name))]
    lines = max(1, -(-len(last) // _PLOT_COLUMNS))
    width, height = _PANEL_INCHES
    figure, panels = plt.subplots(
        lines, _PLOT_COLUMNS, figsize=(width * _PLOT_COLUMNS, height * lines), layout="constrained", squeeze=False
    )
    for panel in panels.flat[len(last) :]:
        panel.set_visible(False)
    for run, panel in zip(last, panels.flat, strict=False):
        for number, rank in enumerate(run.ranks):
            times, idle = zip(*rank.samples, strict=True) if rank.samples else ((), ())
            panel.plot(times, idle, lw=1, marker=".", ms=3, label=f"{number}")
        panel.set_ylim(-0.03, 1.03)
        panel.set_xlim(0, run.seconds)
        panel.tick_params(labelsize="x-small")
        panel.set_title(f"{run.case}: {run.seconds:.1f} s", fontsize="small", loc="left")
        panel.legend(title="rank", fontsize="x-small", title_fontsize="x-small", loc="upper right")
    figure.supxlabel("seconds", fontsize="small")
    figure.supylabel("share of the time idle", fontsize="small")
    figure.savefig(target, dpi=110)
    plt.close(figure)
