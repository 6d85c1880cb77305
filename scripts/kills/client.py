"""Owns the clients that keep jobs running through the `openai` package while the server is killed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import httpx
import openai

from kills.lines import URL, Findings

WITHIN_S = 180
ENDED = ("completed", "failed", "expired", "cancelled")
T = TypeVar("T")


class Client:
    """One thread's client, which retries while the server is down."""

    def __init__(self, url: str, stop: threading.Event) -> None:
        self._openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
        self._stop = stop

    def run(self, lines: list[dict[str, Any]], kind: str, key: str) -> tuple[Any, list[Any]]:
        """Run a job from its upload to its deletion; a `cancelled` job is cancelled half way and continued."""
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = self._again(lambda: self._openai.files.create(file=("in.jsonl", data), purpose="batch"))
        given: dict[str, Any] = {"input_file_id": file.id, "endpoint": URL, "completion_window": "24h"}
        job = self._create(given, key)
        if kind == "cancelled":
            self._until(job.id, lambda one: one.request_counts.completed > len(lines) // 3)
            self._again(lambda: self._cancel(job.id))
            earlier = self._until(job.id, lambda one: False)
            job = self._create({"continue_from": earlier.id}, f"{key}-continued")
        job = self._until(job.id, lambda one: False)
        files = [one for one in (job.output_file_id, job.error_file_id) if one]
        texts = [self._again(partial(self._text, one)) for one in files]
        self._again(lambda: self._delete(file.id))
        return job, [json.loads(line) for text in texts for line in text.splitlines()]

    def _create(self, body: dict[str, Any], key: str) -> Any:
        options: Any = {"headers": {"Idempotency-Key": key}}
        return self._again(
            lambda: self._openai.post("/batches", body=body, options=options, cast_to=openai.types.Batch)
        )

    def _text(self, file_id: str) -> str:
        text: str = self._openai.files.content(file_id).text
        return text

    def _cancel(self, job_id: str) -> None:
        with suppress(openai.ConflictError):  # it had ended
            self._openai.batches.cancel(job_id)

    def _delete(self, file_id: str) -> None:
        with suppress(openai.NotFoundError):  # it was deleted before the server died
            self._openai.files.delete(file_id)

    def _until(self, job_id: str, is_reached: Callable[[Any], bool]) -> Any:
        while True:
            job = self._again(lambda: self._openai.batches.retrieve(job_id))
            if job.status in ENDED or is_reached(job):
                return job
            time.sleep(0.1)

    def _again(self, ask: Callable[[], T]) -> T:
        while not self._stop.is_set():
            try:
                return ask()
            except (openai.APIConnectionError, openai.InternalServerError, httpx.HTTPError):
                time.sleep(0.2)
        raise StoppedError


class StoppedError(Exception):
    """The harness stops."""


class Load:
    """Threads that keep jobs running, one after another, until they are stopped."""

    def __init__(self, url: str, lines: list[Any], wanted: dict[str, str], findings: Findings) -> None:
        self.finish, self.abandon = threading.Event(), threading.Event()
        self.faults: list[BaseException] = []
        self._given = (url, lines, wanted, findings)
        self._threads = [threading.Thread(target=self._keep, args=(kind,)) for kind in ("plain", "cancelled")]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        self.finish.set()
        for thread in self._threads:
            thread.join(WITHIN_S)
        is_stuck = any(thread.is_alive() for thread in self._threads)
        self.abandon.set()
        if is_stuck:
            self._given[3].faults.append(f"a job did not end within {WITHIN_S} s of the last kill")

    def _keep(self, kind: str) -> None:
        url, lines, wanted, findings = self._given
        client = Client(url, self.abandon)
        number = 0
        try:
            while not self.finish.is_set():
                job, records = client.run(lines, kind, f"{kind}-{number}")
                name = f"{kind} job {number} ({job.id}, {job.status})"
                if job.status != "completed":
                    findings.faults.append(f"{name}: {job.errors}")
                findings.check(name, kind, [line["custom_id"] for line in lines], wanted, records)
                number += 1
        except StoppedError:
            pass
        except BaseException as error:
            findings.faults.append(f"{kind} job {number}: {error!r}")
            raise
