"""Owns the report of memory pressure: a table of cases, our time by part, the JSON record."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from comparison.figures import paired_ratios, spread
from comparison.report import table

from memory_pressure.measuring import NO_STORE, ROOMY, STOCK, STORE, STREAMED, Pressure, Run

NOTE = """\
Medians (smallest-largest) of the rounds. Suspended: KV kept in the host store, and read back; retracted: KV dropped and
computed again. Computed twice: tokens whose KV was there before; ours are counters of the engine, stock's are read from
its log. Rows a step: sequences in a decode step, on average. Peak: resident memory of all processes of the engine."""
_OURS = (STREAMED, STORE, NO_STORE, ROOMY)


def markdown(pressure: Pressure, rounds: Sequence[dict[str, Run]]) -> str:
    """Return the report; it is empty if no round is finished."""
    whole = [done for done in rounds if len(done) == len(pressure.cases)]
    if not whole:
        return ""
    share = pressure.pool_tokens / pressure.need_tokens
    head = (
        f"{pressure.workload.description}; they have {pressure.need_tokens:,} tokens of KV in all, and the device "
        f"holds {pressure.pool_tokens:,} ({share:.0%}). {len(whole)} rounds."
    )
    return "\n\n".join([head, _table(pressure, whole), _parts(whole), _oddities(whole), NOTE]) + "\n"


def _table(pressure: Pressure, rounds: Sequence[dict[str, Run]]) -> str:
    tokens = pressure.workload.prompt_tokens + pressure.workload.output_tokens
    rows = []
    for case in pressure.cases:
        runs = [done[case.name] for done in rounds]
        theirs = {number: 1 / done[STOCK].seconds for number, done in enumerate(rounds)}
        ratio = paired_ratios({number: 1 / run.seconds for number, run in enumerate(runs)}, theirs)
        rows.append(
            [
                case.name,
                _spread(runs, lambda run: run.seconds),
                f"{tokens / statistics.median(run.seconds for run in runs):,.0f}",
                "-" if ratio is None else ratio.text(2),
                _spread(runs, lambda run: run.interrupted, 0),
                _spread(runs, lambda run: run.recomputed_tokens, 0),
                _spread(runs, _rows_a_step) if any(run.counters for run in runs) else "?",
                _spread(runs, lambda run: run.peak_rss_bytes / 2**30),
            ]
        )
    headings = [
        "",
        "seconds",
        "tokens/s",
        "x stock",
        "suspended or retracted",
        "computed twice",
        "rows a step",
        "peak GiB",
    ]
    return table(headings, rows)


def _rows_a_step(run: Run) -> float:
    return run.counters.get("decode_rows", 0) / max(run.counters.get("decode_steps", 0), 1)


def _spread(runs: Sequence[Run], value: Callable[[Run], float], digits: int = 1) -> str:
    values = [value(run) for run in runs]
    found = spread(values)
    assert found is not None, "a case has a run in every round"
    if not any(values):
        return "0"
    return found.text(digits) if found.low != found.high else f"{found.median:,.{digits}f}"


def _parts(rounds: Sequence[dict[str, Run]]) -> str:
    """Return our time by part, of the run of median time."""
    rows = []
    parts = [part for part, seconds in rounds[0][STREAMED].part_s.items() if seconds > 0]
    for name in _OURS:
        runs = sorted((done[name] for done in rounds), key=lambda run: run.seconds)
        run = runs[(len(runs) - 1) // 2]
        rows.append([name, *(f"{run.part_s.get(part, 0.0):.1f}" for part in parts)])
    return "Seconds by part (the round of median time):\n\n" + table(["", *parts], rows)


def _oddities(rounds: Sequence[dict[str, Run]]) -> str:
    """Return the notes: whether tokens were the same, and how busy the machine was."""
    ours = {str(done[name].outputs) for done in rounds for name in _OURS}
    same = "the same tokens" if len(ours) == 1 else f"{len(ours)} DIFFERENT sets of tokens"
    others = [run.cpus_of_others for done in rounds for run in done.values()]
    return (
        f"Ours gave {same} in all cases and rounds. Other programs kept {statistics.median(others):.1f} cores busy "
        f"meanwhile (at most {max(others):.1f})."
    )


def as_json(pressure: Pressure, rounds: Sequence[dict[str, Run]]) -> dict[str, Any]:
    """Return all figures, without the tokens."""
    return {
        "description": pressure.workload.description,
        "pool_tokens": pressure.pool_tokens,
        "need_tokens": pressure.need_tokens,
        "cases": [dataclasses.asdict(case) for case in pressure.cases],
        "rounds": [
            {name: {**dataclasses.asdict(run), "outputs": None} for name, run in done.items()} for done in rounds
        ],
    }
