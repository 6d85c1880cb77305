"""Owns the report of ranks: tables, a line of active sequences over time, the JSON record."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from comparison.figures import spread
from comparison.report import table

from several_ranks.figures import (
    Run,
    bound_s,
    boundary_share,
    imbalance,
    num_moved,
    routed_shares,
    share,
    stall_shares,
    stalls_are_counted,
)
from several_ranks.measuring import Case, Comparison

NOTE = """\
Medians (smallest-largest) of the rounds; by rank, medians. Bound: the time of one rank on its share of the cores,
divided by the number of ranks, or that of the longest sequence alone, where it is quickest, whichever is longer; paired
by round. Stall: the share of a rank's time in which it waited for other ranks, in the exchanges of layers and before
steps. Idle: stall, the agreement before steps, and waits for requests. Boundary: actions, moves (with their waits) and
the new decode batch, as a share of the time outside prefill passes, of the rank with the most. Imbalance: tokens of the
most loaded expert over the mean. Routed: which share of all routed tokens a rank's experts compute."""
_BARS = "▁▂▃▄▅▆▇█"
_CHART_COLUMNS = 60


def markdown(comparison: Comparison) -> str:
    """Return the report on one workload; it is empty if no round is finished."""
    rounds = comparison.whole_rounds
    if not rounds:
        return ""
    single = next(case for case in comparison.cases if case.num_ranks == 1)
    num_ranks = max(case.num_ranks for case in comparison.cases)
    bounds = [bound_s(done[single.name], list(done.values()), num_ranks) for done in rounds]
    sections = [
        f"## {comparison.name}\n\n{comparison.workload.description}. {len(rounds)} rounds.",
        _bound_text(rounds, single, bounds),
        _main_table(comparison.cases, rounds, bounds),
        _part_table(comparison.cases, rounds),
        _charts(comparison.cases, rounds),
        _oddities(comparison.cases, rounds),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _bound_text(rounds: list[dict[str, Run]], single: Case, bounds: list[float]) -> str:
    alone = ", ".join(
        f"{statistics.median(done[name].longest_alone_s for done in rounds):.1f} s ({name})" for name in rounds[0]
    )
    whole = statistics.median(done[single.name].seconds for done in rounds)
    return f"Bound: {statistics.median(bounds):.1f} s. {single.name}: {whole:.1f} s; longest sequence alone: {alone}."


def _main_table(cases: Sequence[Case], rounds: list[dict[str, Run]], bounds: list[float]) -> str:
    rows = []
    for case in cases:
        runs = [done[case.name] for done in rounds]
        ratios = [run.seconds / bound for run, bound in zip(runs, bounds, strict=True)]
        least = "" if case.num_ranks == 1 or all(stalls_are_counted(run.ranks) for run in runs) else "at least "
        rows.append(
            [
                case.name,
                _spread([run.seconds for run in runs], "{:.1f}"),
                _spread(ratios, "{:.2f}"),
                _by_rank(runs, lambda ranks: [rank.waiting_share for rank in ranks]),
                least + _by_rank(runs, stall_shares),
                _spread([100 * boundary_share(run.ranks) for run in runs], "{:.2f} %"),
                _spread([num_moved(run.ranks) for run in runs], "{:.0f}"),
                _spread([imbalance(run.ranks) for run in runs], "{:.2f}"),
                _by_rank(runs, routed_shares),
            ]
        )
    headings = ["", "seconds", "x bound", "waits by rank", "stall by rank", "boundary", "moves", "imbalance", "routed"]
    return table(headings, rows)


def _spread(values: Sequence[float], form: str) -> str:
    found = spread(values)
    assert found is not None, "a case has a run in every round"
    median, low, high = (form.format(value) for value in (found.median, found.low, found.high))
    return median if low == high else f"{median} ({low}-{high})"


def _by_rank(runs: Sequence[Run], shares: Callable[[Sequence[Any]], list[float]]) -> str:
    """Return the median share of each rank, in percent."""
    medians = [statistics.median(of_rank) for of_rank in zip(*(shares(run.ranks) for run in runs), strict=True)]
    return ", ".join(f"{100 * value:.0f} %" for value in medians)


def _part_table(cases: Sequence[Case], rounds: list[dict[str, Run]]) -> str:
    """Return each rank's time by part, of the round of median time."""
    rows, parts = [], list(next(iter(rounds[0].values())).ranks[0].part_s)
    for case in cases:
        run = middle([done[case.name] for done in rounds])
        for number, rank in enumerate(run.ranks):
            cores = ",".join(map(str, run.cores[number])) if number < len(run.cores) else "?"
            label = f"{case.name}, rank {number} (cores {cores})"
            rows.append([label, *(f"{100 * share(rank, part):.1f}" for part in parts)])
    return "Share of the time by part, in percent (the round of median time):\n\n" + table(["", *parts], rows)


def middle(runs: Sequence[Run]) -> Run:
    """Return the run of median time; of an even number, the faster of the two."""
    return sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]


def _charts(cases: Sequence[Case], rounds: list[dict[str, Run]]) -> str:
    """Return the sequences that each rank decodes over time, of the round of median time."""
    lines = []
    for case in cases:
        run = middle([done[case.name] for done in rounds])
        if not run.active:
            continue
        most = max(max(rows) for _, rows in run.active)
        lines.append(f"{case.name}: 0 to {run.seconds:.0f} s, full height {most:.0f} sequences")
        for number in range(case.num_ranks):
            lines.append(f"  rank {number} {bars([(t, rows[number]) for t, rows in run.active], run.seconds, most)}")
    return "Sequences decoded at once, by rank:\n\n```\n" + "\n".join(lines) + "\n```" if lines else ""


def bars(samples: Sequence[tuple[float, float]], seconds: float, most: float) -> str:
    """Return one bar for each column of time: the sample at its middle. A blank is no active sequence."""
    text = ""
    for column in range(_CHART_COLUMNS):
        moment = (column + 0.5) * seconds / _CHART_COLUMNS
        value = next((value for until, value in samples if until >= moment), samples[-1][1])
        height = round(value / max(most, 1e-9) * (len(_BARS) - 1))
        text += _BARS[height] if value > 0 else " "
    return text.rstrip()


def _oddities(cases: Sequence[Case], rounds: list[dict[str, Run]]) -> str:
    """Return the notes: outputs that differ between cases of one model, and a busy machine."""
    said = []
    for model in dict.fromkeys(case.model for case in cases):
        names = [case.name for case in cases if case.model == model]
        digests = {done[name].outputs for done in rounds for name in names}
        if len(names) > 1:
            same = "the same tokens" if len(digests) == 1 else f"{len(digests)} DIFFERENT sets of tokens"
            said.append(f"{', '.join(names)}: {same} in all rounds.")
    others = [run.cpus_of_others for done in rounds for run in done.values()]
    said.append(
        f"Other programs kept {statistics.median(others):.1f} cores busy meanwhile (at most {max(others):.1f})."
    )
    return " ".join(said)


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return all figures of one workload."""
    return {
        "name": comparison.name,
        "description": comparison.workload.description,
        "prompt_lens": [len(prompt) for prompt in comparison.workload.prompts],
        "output_lens": comparison.workload.output_lens,
        "cases": [{**dataclasses.asdict(case), "model": str(case.model)} for case in comparison.cases],
        "rounds": [{name: dataclasses.asdict(run) for name, run in done.items()} for done in comparison.rounds],
    }
