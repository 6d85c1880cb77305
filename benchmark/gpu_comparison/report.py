"""Owns what a GPU comparison looks like: the table of cases, the verdicts, and the JSON record. Measures nothing."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from comparison import machine
from comparison.figures import Spread, paired_ratios, spread
from comparison.report import table

from gpu_comparison.cases import NEVER_BELOW, Regime, Settings
from gpu_comparison.trace_overlap import overlap_of, read_trace
from gpu_comparison.visits import Found, Visit, compared
from sgl_batch.byte_sizes import format_bytes

NOTE = """\
Median (smallest-largest) of the rounds; starting and a warm-up are not in the seconds. Suspended: KV kept in host \
memory and read back (ours); retracted: KV dropped and computed again (stock). Computed twice: tokens whose KV was \
there before; ours are counters of the engine, stock's are read from its log. Peak: resident host memory."""
TINY_NOTE = "A tiny shape on a CPU: this run shows that the benchmark works. Its figures say nothing of a GPU."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Where and how a run was made. `label`: of attention, which both engines have, or each its own."""

    command: Sequence[str]
    started: datetime
    machine: dict[str, Any]
    source: dict[str, Any]
    label: str
    is_tiny: bool


def markdown(regime: Regime, found: Found, settings: Settings, about: About) -> str:
    """The report of all that was found so far."""
    source = about.source["commit"] or "no git commit"
    changed = f" with {about.source['changed_files']} changed files" if about.source["changed_files"] else ""
    versions = next((visit.versions for visit in found.visits if visit.versions), {})
    shape = regime.shape
    sections = [
        f"# {regime.name}: {regime.title}",
        f"{shape.name}, {format_bytes(shape.weight_bytes)} of weights in bfloat16"
        f"{'' if regime.checkpoint else ', dummies'}; {format_bytes(shape.kv_token_bytes)} of KV a token. "
        f"{regime.workload.description}. {about.label}.",
        f"{machine.describe(about.machine)}.",
        f"{about.started:%Y-%m-%d}, {source[:12]}{changed}: `{shlex.join(about.command)}`; "
        f"{', '.join(f'{name} {version}' for name, version in versions.items()) or 'no versions known'}.",
        TINY_NOTE if about.is_tiny else "",
        _table(regime, found, settings),
        "\n".join(f"- {line}" for line in verdicts(regime, found)),
        _parts(regime, found),
        "\n".join(f"- {name}: {fault}" for name, fault in _faults(regime, found)),
        " ".join([NOTE, *regime.notes]),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _table(regime: Regime, found: Found, settings: Settings) -> str:
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
                _cell(visits, lambda visit: visit.interrupted, 0),
                _cell(visits, lambda visit: visit.recomputed_tokens, 0),
                _cell(visits, lambda visit: visit.peak_rss_bytes / 2**30, 1),
                _cell(visits, lambda visit: visit.start_s, 0),
                _status(case.lacking, visits, found.fault_of(case.name)),
            ]
        )
    headings = ["", "role", "seconds", "tokens/s", "output tokens/s", "suspended or retracted", "computed twice"]
    return table([*headings, "peak GiB", "start s", "status"], rows)


def _parts(regime: Regime, found: Found) -> str:
    """Where our time goes, in the round of median time; on a GPU, what the host gives it and waits for."""
    ours = compared(regime, found)[0]
    if ours is None:
        return ""
    visits = sorted(found.ran(ours.name).values(), key=lambda visit: visit.wall_s)
    parts = visits[len(visits) // 2].part_s
    told = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items() if seconds >= 0.05)
    return f"Seconds of {ours.name} by part, as the host sees them: {told}." if told else ""


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


def ratio(regime: Regime, found: Found) -> Spread | None:
    """How many times as fast as the best peer ours is, paired by round; None where they share none."""
    ours, best = compared(regime, found)
    if ours is None or best is None:
        return None
    walls = [{number: visit.wall_s for number, visit in found.ran(case.name).items()} for case in (best, ours)]
    return paired_ratios(walls[0], walls[1])


def bound_share(regime: Regime, found: Found) -> Spread | None:
    """Of the time that the experts needed take at the host's copy rate, in what ours took; None where not known."""
    ours, rate = compared(regime, found)[0], (found.copy_rate or {}).get("bytes_per_s")
    if ours is None or rate is None:
        return None
    visits = found.ran(ours.name).values()
    return spread(needed_bytes(regime, visit) / rate / visit.wall_s for visit in visits)


def needed_bytes(regime: Regime, visit: Visit) -> int:
    """Of experts that the passes of a visit of ours asked for, each once a pass, those that were there included."""
    return visit.counters.get("weights_routed", 0) * regime.shape.expert_bytes


def verdicts(regime: Regime, found: Found) -> list[str]:
    """What was asked for and what was found, a line each."""
    ours, best = compared(regime, found)
    times = ratio(regime, found)
    lines = []
    if times is None:
        missing = [name for name, case in (("none of ours", ours), ("no peer", best)) if case is None]
        why = " and ".join(missing) + " has run" if missing else "no round has both"
        lines.append(f"No ratio: {why}.")
    else:
        assert ours is not None, "a ratio is of two cases"
        assert best is not None, "a ratio is of two cases"
        lines.append(f"{ours.name} is {times.text(2)} times as fast as {best.name}.")
        if regime.bar is not None:
            lines.append(f"Bar of {regime.bar} times: {_reached(times.median >= regime.bar)}.")
        lines.append(f"Never below {NEVER_BELOW} times, in any round: {_reached(times.low >= NEVER_BELOW)}.")
    if regime.bound_bar is not None:
        lines += _bound_lines(regime, found, regime.bound_bar)
    return lines + _profile_lines(found)


def _bound_lines(regime: Regime, found: Found, bar: float) -> list[str]:
    share, rate, ours = bound_share(regime, found), found.copy_rate or {}, compared(regime, found)[0]
    if "fault" in rate:
        return [f"No bound: the host's copy rate could not be measured ({rate['fault']})."]
    if share is None or ours is None:
        return ["No bound: none of ours has run."]
    visits = list(found.ran(ours.name).values())
    needed, read = needed_bytes(regime, visits[0]), visits[0].counters.get("weights_bytes_read", 0)
    rate_text = f"{rate['bytes_per_s'] / 1e9:.1f} GB/s ({rate['low'] / 1e9:.1f}-{rate['high'] / 1e9:.1f})"
    return [
        f"Copy rate, {rate['what']}: {rate_text}. The passes of a round needed {needed / 1e9:.2f} GB of experts and "
        f"fetched {read / 1e9:.2f} GB.",
        f"Share of the bound, needed bytes at that rate: {100 * share.median:.0f} % ({100 * share.low:.0f}-"
        f"{100 * share.high:.0f}); bar of {100 * bar:.0f} %: {_reached(share.median >= bar)}.",
    ]


def _profile_lines(found: Found) -> list[str]:
    if found.profile_fault is not None:
        return [f"No profile: {found.profile_fault}."]
    lines = []
    for trace in found.traces:
        overlap = overlap_of(read_trace(trace))
        said = "a trace without a GPU" if overlap is None else overlap.text()
        lines.append(f"Profile ({trace.name}): {said}.")
    return lines


def _reached(reached: bool) -> str:
    return "reached" if reached else "NOT reached"


def as_json(regime: Regime, found: Found, settings: Settings, about: About) -> dict[str, Any]:
    """The whole record: what was asked, where, raw figures of every visit, and what is said of them."""
    ours, best = compared(regime, found)
    times, share = ratio(regime, found), bound_share(regime, found)
    return {
        "date": about.started.astimezone(UTC).isoformat(timespec="seconds"),
        "command": list(about.command),
        "source": about.source,
        "machine": about.machine,
        "regime": {"name": regime.name, "title": regime.title, "bar": regime.bar, "bound_bar": regime.bound_bar},
        "shape": dataclasses.asdict(regime.shape),
        "workload": regime.workload.description,
        "label": about.label,
        "settings": {**dataclasses.asdict(settings), "model": str(settings.model), "out": str(settings.out)},
        "cases": [{**dataclasses.asdict(case), "role": case.role.value} for case in regime.cases],
        "visits": [dataclasses.asdict(visit) for visit in found.visits],
        "copy_rate": found.copy_rate,
        "traces": [str(trace) for trace in found.traces],
        "profile_fault": found.profile_fault,
        "compared": {"ours": None if ours is None else ours.name, "best_peer": None if best is None else best.name},
        "times_as_fast": None if times is None else dataclasses.asdict(times),
        "share_of_bound": None if share is None else dataclasses.asdict(share),
        "verdicts": verdicts(regime, found),
    }
