"""Owns the record of a call as JSON lines: where and how, every finished visit, and each regime's result."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_comparison.bounds import CaseBound, case_bound, copy_share, ratio, verdicts
from gpu_comparison.cases import Regime, Settings
from gpu_comparison.found import Found, compared
from gpu_comparison.goals import Verdict
from gpu_comparison.machine_rates import Machine


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Where and how a call was made. `label`: the attention of both engines, or of each."""

    command: Sequence[str]
    started: datetime
    machine: dict[str, Any]
    source: dict[str, Any]
    label: str
    is_tiny: bool
    rates: Machine = dataclasses.field(default_factory=Machine)


class Record:
    """A file of JSON lines, which are appended when they are known."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, kind: str, values: dict[str, Any]) -> None:
        """Append one line."""
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"kind": kind, **values}) + "\n")


def run_line(about: About) -> dict[str, Any]:
    """Return the line of where and how."""
    return {
        "date": about.started.astimezone(UTC).isoformat(timespec="seconds"),
        "command": list(about.command),
        "source": about.source,
        "machine": about.machine,
        "label": about.label,
        "tiny": about.is_tiny,
        "rates": dataclasses.asdict(about.rates),
    }


def regime_line(regime: Regime, settings: Settings) -> dict[str, Any]:
    """Return the line of what is compared, with which arguments."""
    return {
        "regime": regime.name,
        "title": regime.title,
        "shape": dataclasses.asdict(regime.shape),
        "workload": regime.workload.description,
        "rounds": settings.rounds,
        "cases": [{**dataclasses.asdict(case), "role": case.role.value} for case in regime.cases],
    }


def visit_lines(regime: Regime, found: Found, since: int) -> list[dict[str, Any]]:
    """Return the lines of the visits from number `since` on."""
    return [{"regime": regime.name, **dataclasses.asdict(visit)} for visit in found.visits[since:]]


def result_line(regime: Regime, found: Found, about: About) -> dict[str, Any]:
    """Return the line of a regime's result."""
    ours, best = compared(regime, found)
    times, share = ratio(regime, found), copy_share(regime, found, about.rates)
    bounds = {case.name: case_bound(regime, found, about.rates, case) for case in regime.cases}
    return {
        "regime": regime.name,
        "ours": None if ours is None else ours.name,
        "best_peer": None if best is None else best.name,
        "times_as_fast": None if times is None else dataclasses.asdict(times),
        "share_of_copy_rate": None if share is None else dataclasses.asdict(share),
        "bounds": {name: _bound(bound) for name, bound in bounds.items() if bound is not None},
        "distinct_experts": {name: dataclasses.asdict(one) for name, one in found.distinct.items()},
        "routing_fault": found.routing_fault,
        "goals": [_goal(verdict) for verdict in verdicts(regime, found, about.rates, is_tiny=about.is_tiny)],
        "traces": [str(trace) for trace in found.traces],
        "profile_fault": found.profile_fault,
    }


def _bound(bound: CaseBound) -> dict[str, Any]:
    return dataclasses.asdict(bound)


def _goal(verdict: Verdict) -> dict[str, Any]:
    measured = None if verdict.measured is None else dataclasses.asdict(verdict.measured)
    return {"goal": verdict.goal.text(), "measured": measured, "met": verdict.met, "text": verdict.text}
