"""Makes the job and file objects that the API shows, from rows and the state of running jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sgl_batch.jobs.batch_service.active_job import ActiveJob
from sgl_batch.jobs.batch_service.fair_share import weight_of
from sgl_batch.jobs.batch_service.job_time import time_fields
from sgl_batch.jobs.batch_service.lifecycle import ENDED, JobStatus
from sgl_batch.jobs.batch_service.objects import BatchObject, FileObject, StorageState
from sgl_batch.jobs.batch_service.window_judgement import PlannedWork, by_plan, by_rate
from sgl_batch.jobs.job_store.file_rows import FileRow
from sgl_batch.jobs.job_store.job_rows import JobRow

_TIMES = (
    "created_at in_progress_at expires_at finalizing_at completed_at failed_at expired_at cancelling_at cancelled_at"
).split()


def file_object(row: FileRow) -> FileObject:
    """Return the object of a whole file."""
    return FileObject(
        id=row.id,
        bytes=row.num_bytes,
        created_at=row.created_at,
        filename=row.filename,
        purpose=row.purpose,
        expires_at=row.expires_at,
    )


def running_output(job: ActiveJob, file_id: str, num_bytes: int) -> FileObject:
    """Return the object of the output of a running job, with what can be read so far."""
    return FileObject(
        id=file_id,
        bytes=num_bytes,
        created_at=job.row.created_at,
        filename=output_name(job.row, file_id),
        purpose="batch_output",
        status="uploaded",
        status_details=f"job {job.id} is {job.status}: these are its lines before the first that is not finished",
    )


def output_name(job: JobRow, file_id: str) -> str:
    """Return the filename of a job's output or error file."""
    return f"{job.id}_{'output' if file_id == job.output_file_id else 'error'}.jsonl"


def batch_object(
    row: JobRow,
    active: ActiveJob | None,
    *,
    now: float,
    engine_ready: bool,
    storage: StorageState,
    planned: PlannedWork | None = None,
    price_per_hour: float | None = None,
) -> BatchObject:
    """Return the object of a job; `active` is given while it has not ended, `planned` where the engine has a plan.

    Its files are named from the first line on that is committed to them.
    """
    if active is not None:
        row = active.row
    completed = active.totals.completed if active else row.completed
    failed = active.totals.failed if active else row.failed
    metadata = json.loads(row.metadata) if row.metadata else None
    extra: dict[str, Any] = {
        "name": (metadata or {}).get("name") or row.input_filename,
        "priority": weight_of(metadata),
        "output_file_id": row.output_file_id,
        "error_file_id": row.error_file_id,
        "seed": row.seed,
        "continue_from": row.continue_from,
        "percent": round(100 * (completed + failed) / row.total, 2) if row.total else 0.0,
        **time_fields(active or row, planned, price_per_hour),
    }
    if active is not None and row.status not in ENDED:
        extra |= _progress(active, now, planned)
        extra |= {"engine": "ready" if engine_ready else "absent", "storage": storage.to_json()}
    return BatchObject(
        id=row.id,
        endpoint=row.endpoint,
        model=row.model,
        input_file_id=row.input_file_id,
        completion_window=row.completion_window,
        status=row.status,
        errors=json.loads(row.errors) if row.errors else None,
        output_file_id=row.output_file_id if row.has_output or completed else None,
        error_file_id=row.error_file_id if row.has_errors or failed else None,
        request_counts={"total": row.total, "completed": completed, "failed": failed},
        usage=_usage(active or row),
        metadata=metadata,
        x_sgl_batch=extra,
        **{name: getattr(row, name) for name in _TIMES},
    )


def _usage(source: ActiveJob | JobRow) -> Mapping[str, Any]:
    totals = source.totals if isinstance(source, ActiveJob) else source
    return {
        "input_tokens": totals.input_tokens,
        "output_tokens": totals.output_tokens,
        "total_tokens": totals.input_tokens + totals.output_tokens,
        "input_tokens_details": {"cached_tokens": totals.cached_tokens},
        "output_tokens_details": {"reasoning_tokens": totals.reasoning_tokens},
    }


def _progress(job: ActiveJob, now: float, planned: PlannedWork | None) -> dict[str, Any]:
    shown = job.tracker.snapshot(job.num_in_flight)
    extra: dict[str, Any] = {"in_flight": job.num_in_flight, "contiguous_lines": job.lines.contiguous}
    if job.status is not JobStatus.IN_PROGRESS:
        return extra
    extra |= {
        "lines_per_s": round(shown.lines_per_s, 3),
        "tokens_in_per_s": round(shown.tokens_in_per_s, 3),
        "tokens_out_per_s": round(shown.tokens_out_per_s, 3),
    }
    if job.runs and shown.eta_s is not None:
        extra |= by_rate(shown.eta_s, now, job.row.expires_at)
    elif planned is not None:
        elapsed_s = shown.elapsed_s if job.runs else 0.0
        extra |= by_plan(planned, job.load_left, elapsed_s, now, job.row.expires_at)
    return extra
