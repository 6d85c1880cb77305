"""Makes the fields of the API that say what time of the engine a job has had, will have, and what that costs. Pure."""

from __future__ import annotations

from typing import Any

from sgl_batch.jobs.batch_service.active_job import ActiveJob
from sgl_batch.jobs.batch_service.lifecycle import JobStatus
from sgl_batch.jobs.batch_service.window_judgement import PlannedWork
from sgl_batch.jobs.cost import EngineTime, job_cost
from sgl_batch.jobs.job_store.job_rows import JobRow


def time_fields(
    source: ActiveJob | JobRow, planned: PlannedWork | None, price_per_hour: float | None
) -> dict[str, Any]:
    """Return `engine_time`, `expected_engine_time` while the job runs and it is known, and with a price `cost`.

    Args:
        source: The job while it has not ended, its part of the engine's time settled; else its row.
        planned: What the engine's plan predicts; None without one.
        price_per_hour: The price of the engine; None where costs are not shown.
    """
    spent = _spent(source)
    fields: dict[str, Any] = {"engine_time": spent.as_dict()}
    if isinstance(source, ActiveJob) and source.status is JobStatus.IN_PROGRESS:
        fields |= _expected(source, spent, planned)
    if price_per_hour is not None:
        fields["cost"] = job_cost(fields["engine_time"], fields.get("expected_engine_time"), price_per_hour)
    return fields


def _spent(source: ActiveJob | JobRow) -> EngineTime:
    seconds, totals = (
        (source.engine_share.seconds, source.totals) if isinstance(source, ActiveJob) else (source.engine_s, source)
    )
    return EngineTime(
        seconds=seconds,
        lines=totals.engine_lines,
        input_tokens=totals.engine_input_tokens,
        output_tokens=totals.engine_output_tokens,
    )


def _expected(job: ActiveJob, spent: EngineTime, planned: PlannedWork | None) -> dict[str, Any]:
    """Return the time of the whole job: at the rate so far, or before its first answer by the plan."""
    left = job.row.total - job.totals.completed - job.totals.failed
    if spent.lines:
        whole, judged_by = spent.times(1 + left / spent.lines), "rate"
    elif planned is not None and (seconds := planned.rates.seconds(job.load_left)):
        whole, judged_by = _planned(job, left, max(seconds, spent.seconds)), "plan"
    else:
        return {}
    return {"expected_engine_time": {**whole.as_dict(), "judged_by": judged_by}}


def _planned(job: ActiveJob, left: int, seconds: float) -> EngineTime:
    load = job.load_left
    return EngineTime(seconds=seconds, lines=left, input_tokens=load.prompt_tokens, output_tokens=load.output_tokens)
