"""One finished line on its way to the segment: its record and what it adds to its job; decides nothing about when."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sgl_batch.core.answers import LineResponse
from sgl_batch.jobs.job_store.result_rows import Totals
from sgl_batch.jobs.request_line import RefusedLine, RequestLine
from sgl_batch.jobs.result_lines import internal_error_response, record_token, refused_record, response_record

if TYPE_CHECKING:
    from sgl_batch.jobs.batch_service.active_job import ActiveJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The bytes of a line's record, with its newline, and what they add to the counts."""

    data: bytes
    totals: Totals

    @property
    def failed(self) -> bool:
        """Whether it belongs in the error file."""
        return self.totals.failed > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedLine:
    """A line that the committer is to commit, and what is to be called when it is on the disk.

    `encode` is run by the thread that writes, not by the event loop; it may be run again, and gives the same.
    """

    job: ActiveJob
    index: int
    encode: Callable[[], Record]
    on_committed: Callable[[], None]


def answered(job_id: str, line: RequestLine, response: LineResponse) -> Callable[[], Record]:
    """The record of a line that the engine answered."""
    return partial(_encode_answer, job_id, line.index, line.custom_id, line.number, response)


def refused(job_id: str, line: RefusedLine) -> Callable[[], Record]:
    """The record of a line that no engine need see."""
    return partial(_encode_refusal, job_id, line)


def usage_totals(body: Mapping[str, object], *, failed: bool) -> Totals:
    """What a response's usage adds to its job."""
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


def _encode_answer(job_id: str, index: int, custom_id: str, number: int, response: LineResponse) -> Record:
    token = record_token(job_id, index)
    try:
        data = response_record(token, custom_id, number, response)
    except (RecursionError, TypeError) as error:  # nested too deeply for JSON, or none: no other line is to wait for it
        response = internal_error_response(token, error)
        data = response_record(token, custom_id, number, response)
    return Record(data=data, totals=usage_totals(response.body, failed=response.status_code != 200))


def _encode_refusal(job_id: str, line: RefusedLine) -> Record:
    data = refused_record(record_token(job_id, line.index), line.custom_id, line.number, line.error)
    return Record(data=data, totals=Totals(failed=1))


def _details(usage: Mapping[str, object], name: str) -> Mapping[str, object]:
    details = usage.get(name)
    return details if isinstance(details, dict) else {}


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
