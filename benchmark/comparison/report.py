"""Owns the report of a comparison: the Markdown tables and the JSON record."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from comparison import machine
from comparison.figures import Agreement, Spread, agreement, paired_ratios, spread
from comparison.rounds import EngineRun, RoundResult, Settings
from comparison.workload import Workload

# Others that keep more of a machine's cores busy than this make a time worth little.
_QUIET_CORES = 0.2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """All results of one comparison."""

    workload: Workload
    settings: Settings
    runs: list[EngineRun]
    machine: dict[str, Any]
    source: dict[str, Any]
    command: Sequence[str]
    started: datetime


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [headings, *rows]) for i in range(len(headings))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
        return "| " + " | ".join(padded) + " |"

    return "\n".join([line(headings), line(rule), *(line(row) for row in rows)])


def phase_counts(done: RoundResult) -> dict[str, Any]:
    """Return sgl_batch's counters of the timed region; empty for other engines."""
    before, after = done.details_before, done.details_after
    if "part_s" not in after:
        return {}
    parts = {name: value - before["part_s"].get(name, 0.0) for name, value in after["part_s"].items()}
    counts = {name: value - before["counters"].get(name, 0) for name, value in after["counters"].items()}
    gemms = counts.get("expert_gemms", 0)
    rows = counts.get("expert_rows", 0) / gemms if gemms else None
    return {"part_s": parts, "counters": counts, "mean_rows_per_expert_gemm": rows}


def _speed_of(tokens: int, run: EngineRun) -> dict[int, float]:
    return run.by_round(lambda done: tokens / done.wall_s)


def _agreements(runs: Sequence[EngineRun], *, sampled: bool) -> dict[str, Agreement]:
    """Compare each engine's greedy outputs with the first engine's, from the first round of each."""
    done = [run for run in runs if run.rounds]
    if not done or sampled:
        return {}
    reference = done[0].rounds[0].outputs
    return {run.name: agreement(reference, run.rounds[0].outputs) for run in done[1:]}


def summaries(record: Record) -> dict[str, Any]:
    """Return for each engine the spreads of times, speeds, memory and ratios, and agreement, or its error."""
    workload, found = record.workload, {}
    both = workload.prompt_tokens + workload.output_tokens
    agreements = _agreements(record.runs, sampled=bool(record.settings.sampling))
    for run in record.runs:
        walls = run.by_round(lambda done: done.wall_s)
        others = {other.name: other.by_round(lambda done: done.wall_s) for other in record.runs if other is not run}
        found[run.name] = {
            "fault": run.fault or _shortfall(run, record.settings.rounds),
            "wall_s": spread(walls.values()),
            "total_tokens_per_s": spread(_speed_of(both, run).values()),
            "output_tokens_per_s": spread(_speed_of(workload.output_tokens, run).values()),
            "peak_rss_bytes": spread(run.by_round(lambda done: done.peak_rss_bytes).values()),
            "start_s": spread(run.by_round(lambda done: done.start_s).values()),
            # A ratio of speeds: the other engine's time is the numerator.
            "times_as_fast_as": {name: paired_ratios(theirs, walls) for name, theirs in others.items()},
            "same_greedy_tokens": agreements.get(run.name),
        }
    return found


def markdown(record: Record) -> str:
    """Return the printed report: what was measured, where, and three tables."""
    found = summaries(record)
    names = [run.name for run in record.runs]
    known = (done.cpus_of_others for run in record.runs for done in run.rounds)
    others = spread(cores for cores in known if cores is not None)
    load = f"other programs kept {others.text(1)} cores busy while engines were timed" if others else "load not known"
    source = record.source["commit"] or "no git commit"
    asked = ", ".join(f"{name} {value:g}" for name, value in record.settings.sampling.items())
    sampling = f"sampled at {asked}" if asked else "greedy"
    changed = f" with {record.source['changed_files']} changed files" if record.source["changed_files"] else ""
    sections = [
        f"{record.workload.description}; {record.settings.model.name}, {record.settings.dtype}; {sampling}; "
        f"rounds: {record.settings.rounds}, alternating, a fresh process each.",
        f"{machine.describe(record.machine)}; {load}.",
        f"{record.started:%Y-%m-%d}, {source[:12]}{changed}: `{shlex.join(record.command)}`",
        _load_warning(record.runs),
        _engine_table(found, greedy=not record.settings.sampling),
        _ratio_table(found, names),
        _part_table(record.runs),
        _plans(record.runs),
        _versions_text(record.runs),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _load_warning(runs: Sequence[EngineRun]) -> str:
    """Return which rounds others disturbed, or nothing."""
    disturbed = [
        f"{run.name} in round {done.number} ({done.cpus_of_others:.1f} cores)"
        for run in runs
        for done in run.rounds
        if done.cpus_of_others is not None and done.cpus_of_others > _QUIET_CORES
    ]
    if not disturbed:
        return ""
    return f"WARNING: other programs took more than {_QUIET_CORES} cores from {', '.join(disturbed)}."


def _versions_text(runs: Sequence[EngineRun]) -> str:
    """Return with what versions each engine ran."""
    lines = []
    for run in runs:
        if run.rounds:
            found = run.rounds[0].versions
            lines.append(f"- {run.name}: {', '.join(f'{name} {number}' for name, number in found.items())}")
    return "Versions:\n\n" + "\n".join(lines) if lines else ""


def _shortfall(run: EngineRun, rounds: int) -> str | None:
    """Return what an interruption left undone, or None if every round is there."""
    return None if len(run.rounds) == rounds else f"interrupted after {len(run.rounds)} of {rounds} rounds"


def _cell(value: Spread | None, digits: int) -> str:
    return "" if value is None else value.text(digits)


def _engine_table(found: dict[str, Any], *, greedy: bool) -> str:
    rows, faults = [], []
    reference = next((name for name, engine in found.items() if engine["wall_s"] is not None), None)
    for name, engine in found.items():
        memory = engine["peak_rss_bytes"]
        same, fault = engine["same_greedy_tokens"], engine["fault"]
        rows.append(
            [
                name,
                _cell(engine["wall_s"], 1),
                _cell(engine["total_tokens_per_s"], 0),
                _cell(engine["output_tokens_per_s"], 1),
                "" if memory is None else f"{memory.median / 2**30:.1f}",
                "" if engine["start_s"] is None else f"{engine['start_s'].median:.0f}",
                "reference" if name == reference and greedy else same.text() if same else "",
                "ok" if fault is None else fault.partition(":")[0],
            ]
        )
        if fault is not None:
            faults.append(f"- {name}: {fault}")
    headings = ["engine", "seconds", "tokens/s", "output tokens/s", "peak GiB", "start s"]
    note = (
        "Median (smallest-largest) of the rounds. Tokens are prompt and output together; peak is the resident memory "
        "of the process tree; starting is not in the seconds. Same tokens: greedy outputs identical to the "
        "reference's (tokens before the first difference)."
    )
    return "\n\n".join(
        [table([*headings, "same tokens", "status"], rows), note, *(["\n".join(faults)] if faults else [])]
    )


def _ratio_table(found: dict[str, Any], names: list[str]) -> str:
    ran = [name for name in names if found[name]["wall_s"] is not None]
    if len(ran) < 2:
        return ""
    rows = [
        [name, *("" if name == other else _cell(found[name]["times_as_fast_as"][other], 2) for other in ran)]
        for name in ran
    ]
    return "Times as fast as (row against column, paired by round):\n\n" + table(["", *ran], rows)


def _part_table(runs: Sequence[EngineRun]) -> str:
    """Return sgl_batch's time by part, of each engine that counts it, in the round of median time."""
    counted = {}
    for run in runs:
        if run.rounds:
            middle = sorted(run.rounds, key=lambda done: done.wall_s)[len(run.rounds) // 2]
            counts = phase_counts(middle)
            if counts:
                counted[run.name] = counts
    if not counted:
        return ""
    parts = list(next(iter(counted.values()))["part_s"])
    rows = []
    for name, counts in counted.items():
        mean = counts["mean_rows_per_expert_gemm"]
        seconds = [f"{counts['part_s'].get(part, 0.0):.1f}" for part in parts]
        rows.append([name, *seconds, "" if mean is None else f"{mean:.1f}"])
    headings = ["seconds by part", *parts, "rows per expert GEMM"]
    return "Where the time goes (the round of median time):\n\n" + table(headings, rows)


def _plans(runs: Sequence[EngineRun]) -> str:
    """Return the limits of groups that each sgl_batch ran with, and where they are from: a profile changes them."""
    said = []
    for run in runs:
        details = run.rounds[-1].details_after if run.rounds else {}
        if "planned" in details:
            prefill, decode = details["plan"]["prefill"], details["plan"]["decode"]
            said.append(
                f"- {run.name}: groups of {prefill['b_moe']:,} prompt tokens and of {decode['b_moe']:,} sequences, "
                f"sub-batches of {prefill['b_attn']:,} and {decode['b_attn']:,}; {details['planned']}"
            )
    return "Plans:\n\n" + "\n".join(said) if said else ""


def as_json(record: Record) -> dict[str, Any]:
    """Return the whole record as JSON: the settings, the machine, raw figures of every round, and summaries."""
    settings = dataclasses.asdict(record.settings)
    return {
        "date": record.started.astimezone(UTC).isoformat(timespec="seconds"),
        "command": list(record.command),
        "source": record.source,
        "machine": record.machine,
        "workload": {
            "description": record.workload.description,
            "prompt_lens": [len(prompt) for prompt in record.workload.prompts],
            "output_lens": record.workload.output_lens,
        },
        "settings": {name: _plain(value) for name, value in settings.items()},
        "engines": {run.name: [_round_json(done) for done in run.rounds] for run in record.runs},
        "summaries": _plain(summaries(record)),
    }


def _round_json(done: RoundResult) -> dict[str, Any]:
    values = {f.name: getattr(done, f.name) for f in dataclasses.fields(done) if f.name != "outputs"}
    return {**values, "timed": phase_counts(done)}


def _plain(value: Any) -> Any:
    """Convert dataclasses and paths for JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return value if isinstance(value, (str, int, float, list, type(None))) else str(value)
