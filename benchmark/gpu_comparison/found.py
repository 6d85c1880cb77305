"""Owns the results of a run's visits, and which cases are compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comparison.workload import Workload
from memory_pressure.stock_log import read_retractions, read_running

from gpu_comparison.cases import Case, Regime, Role
from gpu_comparison.routing import Distinct


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One case of one round. `fault`: why it has no time; then the figures after it are 0.

    `interrupted`: how often a sequence was suspended (ours) or retracted (stock), `recomputed_tokens`: whose KV was
    computed twice. `decode_rows`: mean of the sequences of a decode step, None where nothing says. `distinct_tokens`:
    the share of distinct ones among the sequences at one output position.
    """

    case: str
    round: int
    took_s: float = 0.0
    fault: str | None = None
    wall_s: float = 0.0
    start_s: float = 0.0
    interrupted: int = 0
    recomputed_tokens: int = 0
    decode_rows: float | None = None
    distinct_tokens: float = 0.0
    peak_rss_bytes: int = 0
    cpus_of_others: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    part_s: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Found:
    """The results of a run so far. `distinct`: experts by case; `routing_fault`: why they are not known."""

    visits: list[Visit] = field(default_factory=list)
    distinct: dict[str, Distinct] = field(default_factory=dict)
    routing_fault: str | None = None
    traces: list[Path] = field(default_factory=list)
    profile_fault: str | None = None

    def ran(self, case: str) -> dict[int, Visit]:
        """Return the finished visits of a case by round."""
        return {visit.round: visit for visit in self.visits if visit.case == case and visit.fault is None}

    def fault_of(self, case: str) -> str | None:
        """Return why a case has fewer rounds than requested, if that is known."""
        return next((visit.fault for visit in self.visits if visit.case == case and visit.fault is not None), None)


def compared(regime: Regime, found: Found) -> tuple[Case | None, Case | None]:
    """Return our first case that has run, and the peer that was fastest in its first round."""
    ours = next((case for case in regime.of_role(Role.OURS) if found.ran(case.name)), None)
    peers = [case for case in regime.of_role(Role.PEER) if found.ran(case.name)]
    best = min(peers, key=lambda case: _first_wall(found, case), default=None)
    return ours, best


def _first_wall(found: Found, case: Case) -> float:
    ran = found.ran(case.name)
    return ran[min(ran)].wall_s


def figures_of(done: dict[str, Any], workload: Workload, log: str) -> dict[str, Any]:
    """Read the results of a visit: our engine counts itself, and stock's log is read."""
    before, after = done["details_before"], done["details_after"]
    figures = {name: done[name] for name in ("wall_s", "start_s", "versions", "distinct_tokens")}
    if not after:
        given = workload.prompt_tokens + done["warm_up_prompt_tokens"]
        retractions = read_retractions(log, prompt_tokens=given)
        return {
            **figures,
            "interrupted": retractions.sequences,
            "recomputed_tokens": retractions.tokens,
            "decode_rows": read_running(log),
        }
    parts = {name: value - before["part_s"][name] for name, value in after["part_s"].items()}
    counters = {name: value - before["counters"].get(name, 0) for name, value in after["counters"].items()}
    recomputed = sum(counters.get(f"recomputed_tokens_{kind}", 0) for kind in ("planned", "unplanned"))
    # A prefill gives the first token of each sequence, and SGLang's graphs serve decode steps only.
    steps = counters.get("decode_groups", 0) + counters.get("forwards_by_sglang", 0)
    decoded = workload.output_tokens - len(workload.prompts)
    return {
        **figures,
        "interrupted": counters.get("suspensions", 0),
        "recomputed_tokens": recomputed,
        "decode_rows": decoded / steps if steps else None,
        "counters": counters,
        "part_s": parts,
    }
