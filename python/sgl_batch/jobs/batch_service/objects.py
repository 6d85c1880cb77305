"""Owns the objects that the service returns: files, jobs and its own state, each with OpenAI's JSON."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FileObject:
    """A file of a user (`batch`) or of a finished job (`batch_output`). Times are Unix seconds.

    `status` is `processed`, or `uploaded` for the output of a running job: then `bytes` is what can be read so far.
    """

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str = "processed"
    expires_at: int | None = None
    status_details: str | None = None

    def to_openai(self) -> dict[str, Any]:
        """Return the JSON object of the API."""
        return {"object": "file", **_as_dict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchObject:
    """A job as it is now. Times are Unix seconds.

    `output_file_id` and `error_file_id` are None until the first line of that file is committed. While the job runs,
    the content is the lines before the first unfinished one. `errors` is None, or {object: "list", data: [{code, line,
    message, param}]}. `x_sgl_batch` holds, where known: name (metadata.name, else the input's filename), priority,
    percent, lines_per_s, tokens_in_per_s, tokens_out_per_s, eta_s, expected_completion_at, window_at_risk (bool),
    window_text, judged_by (what these four are from: "rate" | "plan"), contiguous_lines (finished lines before the
    first unfinished one), output_file_id and error_file_id (known from the start), in_flight, seed, continue_from,
    engine ("ready" | "absent"), storage ({ok, message, since}), engine_time ({seconds, lines, input_tokens,
    output_tokens}: the job's part of the engine's time, and what the engine answered in it), expected_engine_time (of
    the whole job, while it runs: the same, and judged_by), and with a price of the engine cost ({price_per_hour,
    amount, per_million_lines, per_million_output_tokens, per_million_tokens, expected}: as `jobs.cost` makes it).
    """

    id: str
    endpoint: str
    model: str | None
    input_file_id: str
    completion_window: str
    status: str
    created_at: int
    errors: Mapping[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    request_counts: Mapping[str, int] = field(default_factory=dict)
    usage: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] | None = None
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    x_sgl_batch: Mapping[str, Any] = field(default_factory=dict)

    def to_openai(self) -> dict[str, Any]:
        """Return the JSON object of the API."""
        return {"object": "batch", **_as_dict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePage:
    """One page of a listing of files."""

    data: tuple[FileObject, ...]
    has_more: bool

    def to_openai(self) -> dict[str, Any]:
        """Return the JSON object of the API."""
        return _page([one.to_openai() for one in self.data], self.has_more)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPage:
    """One page of a listing of jobs, newest first."""

    data: tuple[BatchObject, ...]
    has_more: bool

    def to_openai(self) -> dict[str, Any]:
        """Return the JSON object of the API."""
        return _page([one.to_openai() for one in self.data], self.has_more)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileContent:
    """A file's bytes in chunks. `num_bytes` is the exact sum of the chunks, fixed when the file was opened."""

    file: FileObject
    num_bytes: int
    chunks: AsyncIterator[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageState:
    """Whether the jobs directory takes writes. While it does not, no line starts and the service retries."""

    ok: bool = True
    message: str | None = None
    since: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of it in `x_sgl_batch` and in /health."""
        return _as_dict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSnapshot:
    """The service at one moment, for the progress page, /health and /metrics.

    `jobs` are those that have not ended. `counters` only grow, from the service's start: lines_completed, lines_failed,
    lines_rerun, lines_resumed, tokens_resumed, tokens_in, tokens_out, commits, commit_s, committed_bytes,
    engine_deaths, storage_failures, jobs_created, jobs_ended and engine_s (the time in which the engine had lines of
    jobs). `partial_output_tokens` are those known of lines
    without an answer, which are kept when the engine dies. `finished_s_ago` is the time since a line was finished
    (None: no job runs). `fault` is a fault of the program itself that has stopped a part of the service; a service with
    a fault is not healthy.
    """

    jobs: tuple[BatchObject, ...]
    jobs_by_status: Mapping[str, int]
    in_flight: int
    in_flight_bytes: int
    partial_output_tokens: int
    engine_ready: bool
    storage: StorageState
    finished_s_ago: float | None
    fault: str | None
    counters: Mapping[str, float]
    price_per_hour: float | None = None


def _as_dict(value: Any) -> dict[str, Any]:
    return {one.name: getattr(value, one.name) for one in fields(value)}


def _page(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": ends[0], "last_id": ends[1], "has_more": has_more}
