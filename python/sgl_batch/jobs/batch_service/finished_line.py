"""Owns what a finished line brings to the committer: how its result line is made, and what it adds to its job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sgl_batch.core.answers import LineResponse
from sgl_batch.jobs.job_store.result_rows import Totals
from sgl_batch.jobs.request_line import RefusedLine, RequestLine
from sgl_batch.jobs.result_lines import answered_result_line, internal_error_response, refused_result_line, result_token

if TYPE_CHECKING:
    from sgl_batch.jobs.batch_service.active_job import ActiveJob


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultLine:
    """The bytes of a result line, with its newline, and what it adds to the counts of its job."""

    data: bytes
    totals: Totals

    @property
    def failed(self) -> bool:
        """Whether it belongs in the error file."""
        return self.totals.failed > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedLine:
    """A line for the committer, which calls `on_committed` when the result line is on the disk.

    The writing thread calls `encode`, not the event loop. It may call it again, and gets the same bytes.
    """

    job: ActiveJob
    index: int
    encode: Callable[[], ResultLine]
    on_committed: Callable[[], None]


def answered(job_id: str, line: RequestLine, response: LineResponse) -> Callable[[], ResultLine]:
    """Return what makes the result line of a line that the engine answered."""
    return partial(_encode_answer, job_id, line.index, line.custom_id, line.number, response)


def refused(job_id: str, line: RefusedLine) -> Callable[[], ResultLine]:
    """Return what makes the result line of a line that was refused before the engine saw it."""
    return partial(_encode_refusal, job_id, line)


def usage_totals(body: Mapping[str, object], *, failed: bool) -> Totals:
    """Return what a response's usage adds to its job."""
    usage = body.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    return Totals(
        completed=int(not failed),
        failed=int(failed),
        input_tokens=_count(usage.get("prompt_tokens")),
        output_tokens=_count(usage.get("completion_tokens")),
        cached_tokens=_count(_details(usage, "prompt_tokens_details").get("cached_tokens")),
        reasoning_tokens=_count(
            _details(usage, "completion_tokens_details").get("reasoning_tokens") or usage.get("reasoning_tokens")
        ),
    )


def _encode_answer(job_id: str, index: int, custom_id: str, number: int, response: LineResponse) -> ResultLine:
    token = result_token(job_id, index)
    try:
        data = answered_result_line(token, custom_id, number, response)
    except (RecursionError, TypeError) as error:  # nested too deeply, or not JSON: the other lines go on
        response = internal_error_response(token, error)
        data = answered_result_line(token, custom_id, number, response)
    totals = usage_totals(response.body, failed=response.status_code != 200)
    return ResultLine(data=data, totals=totals.of_engine())


def _encode_refusal(job_id: str, line: RefusedLine) -> ResultLine:
    data = refused_result_line(result_token(job_id, line.index), line.custom_id, line.number, line.error)
    return ResultLine(data=data, totals=Totals(failed=1))


def _details(usage: Mapping[str, object], name: str) -> Mapping[str, object]:
    details = usage.get(name)
    return details if isinstance(details, dict) else {}


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
