"""Talks to a server through the `openai` client. Errors say what failed, at which server, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

import httpx
import openai

from sgl_batch.errors import SglBatchError

PAGE = 100
TIMEOUT_S = 120.0
CONNECT_TIMEOUT_S = 10.0
CHUNK_BYTES = 1 << 18

Job = Mapping[str, Any]
"""A batch object of the API, as JSON."""


class JobsError(SglBatchError):
    """A request failed. `exit_code`: 1 where the caller can fix it, 3 where the server is at fault."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ServerGoneError(JobsError):
    """The server cannot be reached, or cannot answer now. It may come back soon."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 3)


class JobsClient:
    """The client of one server. Its methods raise JobsError, and nothing else on purpose."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        self.base_url = base_url
        self._has_key = api_key is not None
        timeout = httpx.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        # No request is repeated automatically: a job without an idempotency key would become two.
        self._client = openai.OpenAI(
            base_url=base_url, api_key=api_key or "none", timeout=timeout, max_retries=0, http_client=None
        )

    def upload(self, name: str, file: BinaryIO) -> str:
        """Upload a file of requests as it is read. Return its id."""
        with self._errors(f"uploading {name}"):
            answer = self._client.files.create(file=(name, file, "application/jsonl"), purpose="batch")
        return str(self._object(answer, "file")["id"])

    def create(self, body: Mapping[str, Any], idempotency_key: str | None) -> Job:
        """Make a job."""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        with self._errors("creating the job"):
            answer = self._client.post(
                "/batches", body=dict(body), options={"headers": headers}, cast_to=openai.types.Batch
            )
        return self._object(answer, "batch")

    def only_model(self) -> str:
        """Return the name of the model that the server serves. Raises JobsError where there is not exactly one."""
        with self._errors("asking for the model"):
            names = [str(model.id) for model in self._client.models.list().data]
        if len(names) != 1:
            raise JobsError(f"{self.base_url} serves {', '.join(names) or 'no model'}; name one with --model", 1)
        return names[0]

    def get(self, job_id: str) -> Job:
        """Return one job as it is now."""
        with self._errors(f"asking for job {job_id}"):
            return self._object(self._client.batches.retrieve(job_id), "batch")

    def cancel(self, job_id: str) -> Job:
        """Begin to cancel a job."""
        with self._errors(f"cancelling job {job_id}"):
            return self._object(self._client.batches.cancel(job_id), "batch")

    def jobs(self, limit: int | None) -> Iterator[Job]:
        """Yield the newest `limit` jobs, or all, reading page by page."""
        after: dict[str, str] = {}
        left = limit
        while left is None or left > 0:
            with self._errors("listing the jobs"):
                page = self._client.batches.list(limit=min(PAGE, left or PAGE), **after)
            if not isinstance(getattr(page, "data", None), list):
                raise self._no_batch_server("its answer is not a list of jobs")
            for one in page.data:
                yield self._object(one, "batch")
            if not page.data or not getattr(page, "has_more", False):
                return
            after = {"after": page.data[-1].id}
            left = None if left is None else left - len(page.data)

    @contextmanager
    def content(self, file_id: str) -> Iterator[tuple[int | None, Iterator[bytes]]]:
        """Give the length of a file, None where the server does not send it, and its bytes as they come."""
        with (
            self._errors(f"downloading file {file_id}"),
            self._client.files.with_streaming_response.content(file_id) as answer,
        ):
            length = answer.headers.get("content-length")
            # The length of a compressed answer is not the length of the file.
            is_plain = answer.headers.get("content-encoding", "identity") == "identity"
            yield int(length) if length and is_plain else None, answer.iter_bytes(CHUNK_BYTES)

    def _object(self, answer: Any, kind: str) -> dict[str, Any]:
        """Return the answer as JSON. Raises JobsError where it is no object of the API: the server has no batches."""
        found = answer.to_dict(mode="json") if hasattr(answer, "to_dict") else None
        if not isinstance(found, dict) or not isinstance(found.get("id"), str):
            raise self._no_batch_server(f"it answered with no {kind} object")
        return found

    def _no_batch_server(self, why: str) -> JobsError:
        end = "" if self.base_url.rstrip("/").endswith("/v1") else "; most base URLs end in /v1"
        return JobsError(
            f"the server {self.base_url} has no Batches API: {why}. Name another with --base-url{end}, or start one "
            "with `sgl-batch serve --model-path PATH`",
            1,
        )

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except openai.APIStatusError as error:
            raise self._refused(doing, error) from error
        except (openai.APIConnectionError, httpx.HTTPError) as error:
            reason = error.__cause__ or error
            raise ServerGoneError(
                f"{doing} failed: the server {self.base_url} cannot be reached ({reason}). Start one with `sgl-batch "
                "serve --model-path PATH`, or name another with --base-url"
            ) from error
        except (openai.OpenAIError, ValueError) as error:  # an answer that is not JSON, for example
            raise self._no_batch_server(f"{doing}: {error}") from error

    def _refused(self, doing: str, error: openai.APIStatusError) -> JobsError:
        body = error.body if isinstance(error.body, Mapping) else {}
        said = f"{body.get('message') or error.message}"
        status = error.status_code
        if status in (401, 403):
            key = "the API key is wrong there" if self._has_key else "it needs an API key"
            return JobsError(
                f"{doing} was refused by {self.base_url}: {key} ({said}). Give --api-key KEY, or set OPENAI_API_KEY", 1
            )
        if status in (404, 405) and (not body or body.get("code") in (None, "not_found", "method_not_allowed")):
            return self._no_batch_server(f"{doing}, it said {status} ({said[:200]})")
        if status == 404:
            return JobsError(f"{doing} failed at {self.base_url}: {said}. `sgl-batch jobs list` shows its jobs", 1)
        if status == 429 or status >= 500:
            return ServerGoneError(f"{doing} failed: {self.base_url} answered with {status}: {said}")
        code = f" ({body['code']})" if body.get("code") else ""
        return JobsError(f"{doing} was refused by {self.base_url}{code}: {said}", 1)
