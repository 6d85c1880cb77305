"""Judges whether a running job ends within its window: by its measured rate, or before there is one, by the plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sgl_batch.core.plan_rates import Load, PlanRates
from sgl_batch.jobs.batch_service.active_job import ActiveJob
from sgl_batch.jobs.batch_service.lifecycle import JobStatus
from sgl_batch.jobs.line_engine import LineEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWork:
    """What the engine's plan predicts, and the work that all jobs in progress have left."""

    rates: PlanRates
    left: Load


def planned_work(engine: LineEngine | None, jobs: Iterable[ActiveJob]) -> PlannedWork | None:
    """Return the work left by the engine's plan; None without an engine, or where it has no plan from a profile."""
    if engine is None or engine.plan_rates is None:
        return None
    running = (job.load_left for job in jobs if job.status is JobStatus.IN_PROGRESS)
    return PlannedWork(rates=engine.plan_rates, left=sum(running, Load()))


def by_rate(eta_s: float, now: float, expires_at: float) -> dict[str, Any]:
    """Return the judgement's fields of the API, for a job that is done in `eta_s` at its measured rate."""
    return _judged("rate", "at this rate the job ends", eta_s, now, expires_at)


def by_plan(planned: PlannedWork, own: Load, elapsed_s: float, now: float, expires_at: float) -> dict[str, Any]:
    """Return the judgement's fields of the API, for a job of which no line is finished since it began to run.

    Args:
        planned: The plan's rates, and the work left of all jobs in progress, this one included. The work of the others
            counts as before it.
        own: The job's work left.
        elapsed_s: Since the job began to run. So much of its own time counts as past, at most all of it.
        now, expires_at: The time, and the end of the window, in Unix seconds.

    Returns:
        No fields for a job whose lengths are not known.
    """
    own_s, total_s = planned.rates.seconds(own), planned.rates.seconds(planned.left)
    if not own_s:
        return {}
    others_s = max(total_s - own_s, 0.0)
    others = f" beside {others_s:,.0f} s of other jobs" if others_s >= 1 else ""
    text = f"by the plan the job takes {own_s:,.0f} s{others} if outputs reach their limits, and ends"
    return _judged("plan", text, others_s + max(own_s - elapsed_s, 0.0), now, expires_at)


def _judged(judged_by: str, text: str, eta_s: float, now: float, expires_at: float) -> dict[str, Any]:
    done_at = now + eta_s
    at_risk = done_at > expires_at
    text += f" {_time_text(abs(expires_at - done_at))} {'after' if at_risk else 'before'} the end of its window"
    if at_risk:
        text += "; lines that are not finished by then get the error batch_expired"
    return {
        "eta_s": round(eta_s, 1),
        "expected_completion_at": int(done_at),
        "window_at_risk": at_risk,
        "window_text": text,
        "judged_by": judged_by,
    }


def _time_text(seconds: float) -> str:
    """Return a time as 90 s, 45 min or 3 h 20 min."""
    minutes = round(seconds / 60)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
