"""Owns the Markdown report of a GPU comparison: figures, bounds and goals."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from comparison import machine
from comparison.figures import Spread, spread
from comparison.report import table

from gpu_comparison.bounds import CaseBound, case_bound, ratio, verdicts
from gpu_comparison.cases import Regime
from gpu_comparison.found import Found, Visit, compared
from gpu_comparison.goals import GOALS, Verdict
from gpu_comparison.machine_rates import describe
from gpu_comparison.record import About
from gpu_comparison.trace_overlap import overlap_of, read_trace
from sgl_batch.byte_sizes import format_bytes

NOTE = """\
Median (smallest-largest) of the rounds; starting and a warm-up are not in the seconds. Suspended: KV kept in host \
memory and read back (ours); retracted: KV dropped and computed again (stock). Computed twice: tokens whose KV was \
there before; ours are counters of the engine, stock's are read from its log. Peak: resident host memory. Tokens are \
sampled at temperature 1 from seeds, since greedily random weights give each token a fixed next one, by which \
sequences become alike or repeat themselves; distinct tokens: their share among the sequences at one output position."""
BOUND_NOTE = """\
A step: a decode step of the rows that ran together (~: not said by the engine, all prompts are assumed). Distinct \
experts: of a layer, counted over the rows in brackets at one output position, by computing the tokens of the run \
again (~: not counted, expected of even routing). Bound: the least time for the whole workload, of weights, KV, \
products and counted copies; share: of that in the time taken. Stock's copies are not counted."""
TINY_NOTE = "A tiny shape on a CPU: this run shows that the benchmark works. Its figures say nothing of a GPU."


def summary(about: About, done: Sequence[tuple[Regime, Found]], not_run: Sequence[str]) -> str:
    """Return the head of a call's report: where it was made, and every goal."""
    source = about.source["commit"] or "no git commit"
    changed = f" with {about.source['changed_files']} changed files" if about.source["changed_files"] else ""
    versions = next((visit.versions for _, found in done for visit in found.visits if visit.versions), {})
    rows = []
    for regime, found in done:
        times = ratio(regime, found)
        judged = verdicts(regime, found, about.rates, is_tiny=about.is_tiny)
        rows += [_goal_row(regime.name, verdict) for verdict in judged]
        if not judged:
            rows.append(
                [regime.name, "none", *(("", "not run") if times is None else (f"{times.text(2)}x", "a finding"))]
            )
    for name in not_run:
        asked = [goal.text() for goal in GOALS.get(name, ())] or ["none"]
        rows += [[name, goal, "", "not run"] for goal in asked]
    sections = [
        f"# GPU comparison, {about.started:%Y-%m-%d}",
        f"`{shlex.join(about.command)}` at {source[:12]}{changed}; "
        f"{', '.join(f'{name} {number}' for name, number in versions.items()) or 'no versions known'}; {about.label}.",
        f"{machine.describe(about.machine)}.",
        describe(about.rates),
        TINY_NOTE if about.is_tiny else "",
        table(["comparison", "goal for one H200", "measured", "result"], rows),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _goal_row(name: str, verdict: Verdict) -> list[str]:
    return [name, verdict.goal.text(), verdict.found, verdict.text]


def markdown(regime: Regime, found: Found, about: About) -> str:
    """Return the report of one regime's results so far."""
    shape = regime.shape
    sections = [
        f"## {regime.name}: {regime.title}",
        f"{shape.name}, {format_bytes(shape.weight_bytes)} of weights in bfloat16"
        f"{'' if regime.checkpoint else ', dummies'}; {format_bytes(shape.kv_token_bytes)} of KV a token. "
        f"{regime.workload.description}.",
        _table(regime, found),
        _bound_table(regime, found, about),
        "\n".join(f"- {line}" for line in _lines(regime, found, about)),
        _parts(regime, found),
        "\n".join(f"- {name}: {fault}" for name, fault in _faults(regime, found)),
        " ".join([NOTE, *regime.notes]),
        BOUND_NOTE,
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _table(regime: Regime, found: Found) -> str:
    ours, best = compared(regime, found)
    both = regime.workload.prompt_tokens + regime.workload.output_tokens
    rows = []
    for case in regime.cases:
        visits = found.ran(case.name)
        picked = {id(ours): " (compared)", id(best): " (best, compared)"}.get(id(case), "")
        rows.append(
            [
                case.name + picked,
                case.role.value,
                _cell(visits, lambda visit: visit.wall_s, 2),
                _cell(visits, lambda visit: both / visit.wall_s, 0),
                _cell(visits, lambda visit: regime.workload.output_tokens / visit.wall_s, 0),
                _cell(visits, lambda visit: 100 * visit.distinct_tokens, 0),
                _cell(visits, lambda visit: visit.interrupted, 0),
                _cell(visits, lambda visit: visit.recomputed_tokens, 0),
                _cell(visits, lambda visit: visit.peak_rss_bytes / 2**30, 1),
                _cell(visits, lambda visit: visit.start_s, 0),
                _status(case.lacking, visits, found.fault_of(case.name)),
            ]
        )
    headings = ["", "role", "seconds", "tokens/s", "output tokens/s", "distinct tokens %", "suspended or retracted"]
    return table([*headings, "computed twice", "peak GiB", "start s", "status"], rows)


def _bound_table(regime: Regime, found: Found, about: About) -> str:
    """Return the table of each case's least work, and the share of the machine's rates that it reached."""
    rows = []
    for case in regime.cases:
        bound = case_bound(regime, found, about.rates, case)
        if bound is not None:
            rows.append([case.name, *_step_cells(regime, found, case.name, bound), *_against_cells(bound)])
    if not rows:
        return ""
    step = ["rows a step", "distinct experts a layer and step", "weights of a step", "KV of a step", "GFLOP of a step"]
    copies = ["copied in", "copied out"]
    return table(["", *step, *copies, "bound s", "bounded by", "share, measured rates", "share, data sheet"], rows)


def _step_cells(regime: Regime, found: Found, name: str, bound: CaseBound) -> list[str]:
    decode, counted = bound.work.decode, found.distinct.get(name)
    experts = f"{bound.distinct:.1f} of {regime.shape.experts}"
    experts += f" in each of {bound.calls:.1f} calls" if bound.calls > 1 else ""
    return [
        f"{'' if bound.rows_said else '~'}{decode.rows:.1f}",
        f"~{experts}" if counted is None else f"{experts} ({counted.rows} rows)",
        format_bytes(round(decode.weight_bytes)),
        format_bytes(round(decode.kv_bytes)),
        f"{decode.flop / 1e9:,.3g}",
        format_bytes(round(bound.work.copy_in_bytes)),
        format_bytes(round(bound.work.copy_out_bytes)),
    ]


def _against_cells(bound: CaseBound) -> list[str]:
    """Return bound, resource and share by measured rates, or by the data sheet's without a measurement."""
    if not bound.against:
        return ["", "", "", ""]
    first = bound.against[0]
    shares = {one.rates.source: _text_percent(one.share) for one in bound.against}
    measured = [share for source, share in shares.items() if not source.startswith("data sheet")]
    sheet = [share for source, share in shares.items() if source.startswith("data sheet")]
    return [f"{first.bound.seconds:.3g}", first.bound.resource, "".join(measured), "".join(sheet)]


def _text_percent(share: Spread) -> str:
    if share.count == 1:
        return f"{share.median:.2%}"
    return f"{share.median:.2%} ({share.low:.2%}-{share.high:.2%})"


def _lines(regime: Regime, found: Found, about: About) -> list[str]:
    """Return a line for each goal: what was compared, and the result."""
    ours, best = compared(regime, found)
    times = ratio(regime, found)
    lines = []
    if times is None or ours is None or best is None:
        missing = [text for text, case in (("none of ours", ours), ("no peer", best)) if case is None]
        lines.append(f"No ratio: {' and '.join(missing) + ' has run' if missing else 'no round has both'}.")
    else:
        lines.append(f"{ours.name} is {times.text(2)} times as fast as {best.name}, by {times.count} paired rounds.")
    for verdict in verdicts(regime, found, about.rates, is_tiny=about.is_tiny):
        lines.append(f"Goal {verdict.goal.text()}; measured {verdict.found or 'nothing'}; {verdict.text}.")
    if found.routing_fault is not None:
        lines.append(f"Distinct experts were not counted: {found.routing_fault}.")
    return lines + _profile_lines(found)


def _parts(regime: Regime, found: Found) -> str:
    """Return our time by part in the round of median time; on a GPU, the host's launches and waits."""
    ours = compared(regime, found)[0]
    if ours is None:
        return ""
    visits = sorted(found.ran(ours.name).values(), key=lambda visit: visit.wall_s)
    parts = visits[len(visits) // 2].part_s
    parts_text = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items() if seconds >= 0.05)
    return f"Seconds of {ours.name} by part, as the host sees them: {parts_text}." if parts_text else ""


def _status(lacking: str | None, visits: dict[int, Visit], fault: str | None) -> str:
    if lacking is not None:
        return lacking
    rounds = f"{len(visits)} round{'' if len(visits) == 1 else 's'}"
    if fault is None:
        return rounds if visits else "not run"
    return f"{rounds}, then {fault.partition(':')[0]}" if visits else fault.partition(":")[0]


def _faults(regime: Regime, found: Found) -> list[tuple[str, str]]:
    faults = [(case.name, found.fault_of(case.name)) for case in regime.cases if case.lacking is None]
    return [(name, fault) for name, fault in faults if fault is not None]


def _cell(visits: dict[int, Visit], value: Callable[[Visit], float], digits: int) -> str:
    found = spread(value(visit) for visit in visits.values())
    return "" if found is None else _text(found, digits)


def _text(value: Spread, digits: int) -> str:
    return value.text(digits) if value.low != value.high else f"{value.median:,.{digits}f}"


def _profile_lines(found: Found) -> list[str]:
    if found.profile_fault is not None:
        return [f"No profile: {found.profile_fault}."]
    lines = []
    for trace in found.traces:
        overlap = overlap_of(read_trace(trace))
        said = "a trace without a GPU" if overlap is None else overlap.text()
        lines.append(f"Profile ({trace.name}): {said}.")
    return lines
