"""Makes a job in one transaction: checks its idempotency key, its input file and the job that it continues."""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from sgl_batch.errors import RequestError
from sgl_batch.jobs.batch_service.batch_request import BatchRequest, body_digest, parse_batch_request
from sgl_batch.jobs.batch_service.fair_share import window_s
from sgl_batch.jobs.batch_service.lifecycle import ENDED, JobStatus
from sgl_batch.jobs.body_rules import refuse, show
from sgl_batch.jobs.failpoints import failpoint
from sgl_batch.jobs.job_store.file_rows import get_file
from sgl_batch.jobs.job_store.ids import is_batch_id, is_file_id, new_batch_id, new_file_id
from sgl_batch.jobs.job_store.job_rows import (
    JobRow,
    find_idempotency_key,
    get_job,
    insert_idempotency_key,
    insert_job,
    known_job,
)
from sgl_batch.jobs.seeds import MAX_JOB_SEED

MAX_KEY_CHARACTERS = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedJob:
    """The job, and whether this request made it or found it by its key."""

    row: JobRow
    is_new: bool


def creation(
    body: Mapping[str, object], idempotency_key: str | None, now: int
) -> Callable[[sqlite3.Connection], CreatedJob]:
    """Return the transaction that makes the job, or finds it by its key. Both raise RequestError."""
    request = parse_batch_request(body)
    if idempotency_key is not None and not 1 <= len(idempotency_key) <= MAX_KEY_CHARACTERS:
        refuse(
            "invalid_idempotency_key",
            f"the Idempotency-Key has {len(idempotency_key)} characters; give 1 to {MAX_KEY_CHARACTERS}",
        )
    digest = body_digest(body)

    def create(db: sqlite3.Connection) -> CreatedJob:
        if idempotency_key is not None and (found := find_idempotency_key(db, idempotency_key)):
            if found[0] != digest:
                conflict(
                    "idempotency_key_reused",
                    f"the Idempotency-Key {show(idempotency_key)} was used for another request, which made {found[1]}; "
                    "give a new key",
                )
            return CreatedJob(row=known_job(db, found[1]), is_new=False)
        row = _new_row(db, request, now)
        insert_job(db, row)
        if idempotency_key is not None:
            insert_idempotency_key(db, idempotency_key, digest, row.id)
        failpoint("creation.rows_written")
        return CreatedJob(row=known_job(db, row.id), is_new=True)

    return create


def conflict(code: str, message: str, param: str | None = None) -> NoReturn:
    """Raise the RequestError of a request that conflicts with the state of a job or file."""
    raise RequestError(code=code, message=message, param=param, status_code=409)


def not_found(kind: str, one_id: str, param: str | None = None) -> NoReturn:
    """Raise the RequestError of an unknown id."""
    message = f"there is no {kind} {show(one_id)}; it never existed, was deleted or has expired"
    raise RequestError(code=f"{kind}_not_found", message=message, param=param, status_code=404)


def _new_row(db: sqlite3.Connection, request: BatchRequest, now: int) -> JobRow:
    earlier = None if request.continue_from is None else _continued(db, request)
    input_file_id = request.input_file_id or (earlier.input_file_id if earlier else "")
    file = get_file(db, input_file_id) if is_file_id(input_file_id) else None
    if file is None:
        not_found("file", input_file_id, "input_file_id")
    if file.purpose != "batch":
        refuse("invalid_input_file", f'file {file.id} has the purpose {file.purpose}, not "batch"', "input_file_id")
    window = request.completion_window or (earlier.completion_window if earlier else "")
    return JobRow(
        id=new_batch_id(),
        status=JobStatus.VALIDATING,
        endpoint=request.endpoint or (earlier.endpoint if earlier else ""),
        completion_window=window,
        input_file_id=file.id,
        metadata=None if request.metadata is None else json.dumps(request.metadata),
        seed=earlier.seed if earlier else secrets.randbelow(MAX_JOB_SEED),
        output_expires_after=request.output_expires_after,
        continue_from=request.continue_from,
        taken_over=int(earlier is None),
        output_file_id=new_file_id(),
        error_file_id=new_file_id(),
        created_at=now,
        expires_at=now + window_s(window),
    )


def _continued(db: sqlite3.Connection, request: BatchRequest) -> JobRow:
    """Return the job that the new one continues. Raises RequestError where it cannot be continued."""
    earlier_id = request.continue_from or ""
    earlier = get_job(db, earlier_id) if is_batch_id(earlier_id) else None
    if earlier is None:
        not_found("batch", earlier_id, "continue_from")
    if earlier.status not in ENDED:
        conflict("batch_not_ended", f"job {earlier.id} is {earlier.status}; cancel it first", "continue_from")
    for field, asked, given in (
        ("input_file_id", request.input_file_id, earlier.input_file_id),
        ("endpoint", request.endpoint, earlier.endpoint),
    ):
        if asked not in (None, given):
            refuse(
                "continue_from_mismatch",
                f"{field} is {show(asked)}, and job {earlier.id} has {show(given)}; leave it out",
                field,
            )
    if earlier.has_output and get_file(db, earlier.output_file_id) is None:
        conflict(
            "output_file_gone",
            f"the output {earlier.output_file_id} of job {earlier.id} was deleted or has expired; create the job "
            "without continue_from",
            "continue_from",
        )
    return earlier
