"""Owns the order of a run: which engine is visited when, each in a fresh process, within the time that there is.

The first round visits every case; later ones visit the case of ours that is compared and the fastest peer, by turns of
order. A visit for which the time that it took before would not suffice is left out, and the report says so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comparison.child import run_child, this_python
from comparison.figures import remaining_s
from comparison.workload import Workload
from memory_pressure.stock_log import read_retractions
from runners.gpu_round import num_passes

from gpu_comparison.cases import Case, Regime, Role, Settings

_LEAST_VISIT_S = 20.0  # in which no engine starts and answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One case of one round. `fault`: why it has no time; then all figures behind it are those of nothing.

    `interrupted`: how often a sequence was suspended (ours) or retracted (stock), `recomputed_tokens`: whose KV was
    computed twice.
    """

    case: str
    round: int
    took_s: float = 0.0
    fault: str | None = None
    wall_s: float = 0.0
    start_s: float = 0.0
    interrupted: int = 0
    recomputed_tokens: int = 0
    peak_rss_bytes: int = 0
    cpus_of_others: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    part_s: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Found:
    """All that a run has found so far. `copy_rate`: of host memory, where a regime asks for its bound."""

    visits: list[Visit] = field(default_factory=list)
    copy_rate: dict[str, Any] | None = None
    traces: list[Path] = field(default_factory=list)
    profile_fault: str | None = None

    def ran(self, case: str) -> dict[int, Visit]:
        """The finished visits of a case by round."""
        return {visit.round: visit for visit in self.visits if visit.case == case and visit.fault is None}

    def fault_of(self, case: str) -> str | None:
        """Why a case has fewer rounds than were asked for, if it says."""
        return next((visit.fault for visit in self.visits if visit.case == case and visit.fault is not None), None)


def compared(regime: Regime, found: Found) -> tuple[Case | None, Case | None]:
    """Of ours the first case that has run, and of the peers the fastest in the first round that each ran."""
    ours = next((case for case in regime.of_role(Role.OURS) if found.ran(case.name)), None)
    peers = [case for case in regime.of_role(Role.PEER) if found.ran(case.name)]
    best = min(peers, key=lambda case: _first_wall(found, case), default=None)
    return ours, best


def _first_wall(found: Found, case: Case) -> float:
    ran = found.ran(case.name)
    return ran[min(ran)].wall_s


class Run:
    """One run of a regime. `changed` is called when `found` has something new; `clock` gives seconds."""

    def __init__(
        self,
        regime: Regime,
        settings: Settings,
        found: Found,
        *,
        say: Callable[[str], None],
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._regime, self._settings, self._found = regime, settings, found
        self._say, self._changed, self._clock = say, changed, clock
        self._began = clock()
        self._took: dict[str, list[float]] = {}

    def all(self) -> None:
        """Every round, then the profile."""
        if self._regime.bound_bar is not None:
            self._found.copy_rate = measure_copy_rate(self._settings)
            self._changed()
        self._round(1, self._regime.cases)
        for number in range(2, self._settings.rounds + 1):
            pair = [case for case in compared(self._regime, self._found) if case is not None]
            self._round(number, pair if number % 2 else pair[::-1])
        if self._settings.profile_steps:
            self._profile()

    def _round(self, number: int, cases: Sequence[Case]) -> None:
        for place, case in enumerate(cases):
            if case.lacking is not None:
                self._add(Visit(case=case.name, round=number, fault=case.lacking))
                continue
            left = self._left_s
            if self._estimate(case) > left:
                fault = f"not run in round {number}: {left:.0f} s were left (--minutes)"
                self._add(Visit(case=case.name, round=number, fault=fault))
                continue
            self._say(f"round {number}/{self._settings.rounds}, {case.name}: started{self._eta(number, cases[place:])}")
            visit = self._visit(case, number)
            self._took.setdefault(case.name, []).append(visit.took_s)
            self._add(visit)

    def _add(self, visit: Visit) -> None:
        self._found.visits.append(visit)
        outcome = visit.fault or f"{visit.wall_s:.1f} s after {visit.start_s:.0f} s of start-up"
        self._say(f"round {visit.round}/{self._settings.rounds}, {visit.case}: {outcome}")
        self._changed()

    @property
    def _left_s(self) -> float:
        return self._settings.until_s - (self._clock() - self._began)

    def _estimate(self, case: Case) -> float:
        """Seconds that a visit will take, by what this case or, before its first time, the shortest other one took."""
        known = {name: min(took) for name, took in self._took.items()}
        return known.get(case.name, min(known.values(), default=_LEAST_VISIT_S))

    def _eta(self, number: int, coming: Sequence[Case]) -> str:
        later = 2 * (self._settings.rounds - number)
        names = [case.name for case in coming if case.lacking is None] + ["of later rounds"] * later
        left = remaining_s(names, self._took)
        if left is None:
            return f"; {self._left_s / 60:.1f} min are left"
        return f"; about {left / 60:.1f} min to go, {self._left_s / 60:.1f} are left"

    def _visit(self, case: Case, number: int, profile: dict[str, Any] | None = None) -> Visit:
        stem = self._settings.out / f"{number}-{''.join(c if c.isalnum() else '-' for c in case.name)}"
        spec, result, log = (stem.with_suffix(f".{kind}") for kind in ("spec.json", "result.json", "log"))
        workload = self._regime.workload
        asked = {
            "engine": case.engine,
            "model": str(self._settings.model),
            "dtype": "bfloat16",
            "arguments": case.arguments,
            "prompts": workload.prompts,
            "output_lens": workload.output_lens,
            "profile": profile,
        }
        spec.write_text(json.dumps(asked), encoding="utf-8")
        end = run_child(
            this_python(),
            spec,
            result,
            log,
            limit_s=max(1.0, min(self._settings.limit_s, self._left_s)),
            threads=None,
            runner="gpu_round.py",
            environment=self._settings.environment,
        )
        spec.unlink()
        common: dict[str, Any] = {"case": case.name, "round": number, "took_s": end.took_s}
        if end.reason is not None:
            return Visit(**common, fault=f"failed in round {number}: {end.reason} ({last_line(log)})")
        done = json.loads(result.read_text(encoding="utf-8"))
        if done["num_output_tokens"] != workload.output_lens:
            fault = f"failed in round {number}: not every prompt has the output tokens that were asked for"
            return Visit(**common, fault=fault)
        figures = figures_of(done, workload, log.read_text(encoding="utf-8", errors="replace"))
        return Visit(**common, **figures, peak_rss_bytes=end.peak_rss_bytes, cpus_of_others=end.cpus_of_others)

    def _profile(self) -> None:
        """One more visit of our case, whose time does not count: a trace of passes from the middle of it."""
        case, found = compared(self._regime, self._found)[0], self._found
        if case is None or self._estimate(case) > self._left_s:
            found.profile_fault = "none of ours has run" if case is None else "no time was left for it (--minutes)"
        else:
            directory = self._settings.out / "profile"
            visits = found.ran(case.name)
            passes = num_passes(visits[min(visits)].counters)
            self._say(f"profile of {case.name}: started")
            asked = {
                "directory": str(directory),
                "num_steps": self._settings.profile_steps,
                "skip_steps": passes // 2,
            }
            visit = self._visit(case, 0, asked)
            found.traces = sorted(directory.glob("*.trace.json.gz"))
            if not found.traces:
                found.profile_fault = visit.fault or "SGLang's profiler wrote no trace"
        self._say(found.profile_fault or f"profile: {', '.join(map(str, found.traces))}")
        self._changed()


def figures_of(done: dict[str, Any], workload: Workload, log: str) -> dict[str, Any]:
    """What a visit found, by what its process wrote and said: ours counts for itself, stock's log is read."""
    before, after = done["details_before"], done["details_after"]
    figures = {name: done[name] for name in ("wall_s", "start_s", "versions")}
    if not after:
        given = workload.prompt_tokens + done["warm_up_prompt_tokens"]
        retractions = read_retractions(log, prompt_tokens=given)
        return {**figures, "interrupted": retractions.sequences, "recomputed_tokens": retractions.tokens}
    parts = {name: value - before["part_s"][name] for name, value in after["part_s"].items()}
    counters = {name: value - before["counters"].get(name, 0) for name, value in after["counters"].items()}
    recomputed = sum(counters.get(f"recomputed_tokens_{kind}", 0) for kind in ("planned", "unplanned"))
    return {
        **figures,
        "interrupted": counters.get("suspensions", 0),
        "recomputed_tokens": recomputed,
        "counters": counters,
        "part_s": parts,
    }


def last_line(log: Path) -> str:
    """The last line of a log that says anything."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"last line of {log.name}: {lines[-1][:200]}" if lines else f"{log.name} is empty"


def measure_copy_rate(settings: Settings, *, num_bytes: int = 1 << 30) -> dict[str, Any]:
    """How fast host memory is read by the device, or why that is not known."""
    spec, result, log = (settings.out / f"copy-rate.{kind}" for kind in ("spec.json", "result.json", "log"))
    spec.write_text(json.dumps({"device": settings.device, "num_bytes": num_bytes, "rounds": 5}), encoding="utf-8")
    end = run_child(
        this_python(),
        spec,
        result,
        log,
        limit_s=settings.limit_s,
        threads=None,
        runner="host_copy_rate.py",
        environment=settings.environment,
    )
    spec.unlink()
    if end.reason is not None:
        return {"fault": end.reason}
    rate: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return rate
