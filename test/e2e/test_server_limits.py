"""File modes, limits, profiles, logs and job fields of a real server, with the real `openai` client."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from .conftest import MODEL, Server, chat_line

pytestmark = pytest.mark.engine

WITHIN_S = 60
OTHERS = 0o077


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server under the usual umask, whose jobs are in a directory that others may read."""
    jobs = tmp_path_factory.mktemp("files") / "jobs"
    before = os.umask(0o022)
    jobs.mkdir(mode=0o755)
    (jobs / "jobs.sqlite").touch(mode=0o644)
    yield start_server("--allow-unauthenticated-control", "--price-per-hour", "3600", jobs_dir=jobs)
    os.umask(before)


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def create(client: openai.OpenAI, lines: list[dict[str, Any]], **more: Any) -> Any:
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("questions.jsonl", data), purpose="batch")
    fields: dict[str, Any] = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **more}
    return client.batches.create(input_file_id=file.id, **fields)


def generate(server: Server, tokens: int) -> None:
    body = {"model": MODEL, "prompt": "Return the", "max_tokens": tokens, "ignore_eos": True}
    assert requests.post(f"{server.url}/v1/completions", json=body, timeout=WITHIN_S).ok


def until(is_reached: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WITHIN_S
    while not (found := is_reached()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_polling_with_the_openai_client_reads_the_output_of_a_running_job(client: openai.OpenAI) -> None:
    lines = [chat_line(f"line {n}", f"Say {n}.", max_tokens=100 * n + 1, ignore_eos=True) for n in range(8)]
    lines[1]["body"]["temperature"] = -3
    batch = create(client, lines)
    seen: set[int] = set()
    deadline = time.monotonic() + WITHIN_S
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < deadline, batch
        if batch.output_file_id is not None:
            text = client.files.content(batch.output_file_id).text
            shown = client.files.retrieve(batch.output_file_id)
            assert shown.purpose == "batch_output"
            assert shown.bytes >= len(text)
            seen.add(len(text.splitlines()))
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed"
    assert seen - {0, 7}, "the first lines could be read while the job ran"
    ids = [json.loads(line)["custom_id"] for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert ids == [f"line {n}" for n in range(8) if n != 1]
    assert json.loads(client.files.content(batch.error_file_id).text)["custom_id"] == "line 1"


def test_a_job_shows_its_name_and_priority_and_the_error_of_a_misplaced_field_names_the_right_one(
    server: Server, client: openai.OpenAI
) -> None:
    batch = create(client, [chat_line("a", "Say.", max_tokens=1)], metadata={"name": "nightly", "priority": "20"})
    jobs = requests.get(f"{server.url}/v1/sgl_batch/progress", timeout=10).json()["jobs"]
    shown = next(job for job in jobs if job["id"] == batch.id)
    assert (shown["x_sgl_batch"]["name"], shown["x_sgl_batch"]["priority"]) == ("nightly", 20)
    with pytest.raises(openai.BadRequestError, match=r"use metadata\.priority"):
        create(client, [chat_line("a", "Say.")], extra_body={"priority": 20})


def test_a_job_costs_the_time_that_it_took_of_the_engine(server: Server, client: openai.OpenAI) -> None:
    batch = create(client, [chat_line(f"r{index}", "Say.", max_tokens=3) for index in range(4)])
    deadline = time.monotonic() + WITHIN_S
    while (batch := client.batches.retrieve(batch.id)).status != "completed":
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    shown = batch.to_dict()
    more = shown["x_sgl_batch"]
    assert more["engine_time"]["lines"] == 4
    assert more["engine_time"]["output_tokens"] == shown["usage"]["output_tokens"]
    assert 0 < more["cost"]["amount"] == more["engine_time"]["seconds"] < WITHIN_S
    assert "sgl_batch:jobs_cost_total" in requests.get(f"{server.url}/metrics", timeout=10).text


@pytest.mark.parametrize("body", ["[]", "null", '{"messages": 3}', '{"messages": [], "response_format": 3}'])
def test_a_body_that_makes_a_validator_fail_is_a_client_error(server: Server, body: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = requests.post(f"{server.url}/v1/chat/completions", data=body, headers=headers, timeout=WITHIN_S)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_profile_has_limits_names_them_and_ends_by_itself(server: Server, tmp_path: Path) -> None:
    def start(**body: Any) -> requests.Response:
        return requests.post(f"{server.url}/start_profile", json=body, timeout=WITHIN_S)

    refused = start(num_steps=1_000_000)
    assert refused.status_code == 400
    assert "give 1 to 100, the limit" in refused.json()["error"]["message"]
    assert start(activities=["RPD"]).status_code == 400
    begun = start(output_dir=str(tmp_path), with_stack=False)
    assert begun.status_code == 200
    assert "20 steps" in begun.text
    assert start(output_dir=str(tmp_path)).status_code == 409, "a profile is running"
    generate(server, 40)
    until(lambda: list(tmp_path.glob("*.trace.json.gz")))
    stopped = requests.post(f"{server.url}/stop_profile", timeout=WITHIN_S)
    assert stopped.status_code == 409, "the profile has ended by itself"
    assert requests.get(f"{server.url}/health", timeout=10).json()["engine"]["restarts"] == 0


def test_requests_are_logged_to_private_files_of_bounded_size(server: Server) -> None:
    def configure(**body: Any) -> requests.Response:
        return requests.post(f"{server.url}/configure_logging", json=body, timeout=WITHIN_S)

    folder = server.jobs_dir / "request_logs"
    assert not [log for log in folder.iterdir() if log.stat().st_size], "nothing is logged by default"
    assert configure(dump_requests_threshold=10**9).status_code == 400
    assert "at most 4 files of 64.00 MiB" in configure(log_requests=True, log_requests_level=2).text
    generate(server, 2)
    [log] = folder.iterdir()
    assert "Return the" in log.read_text()
    assert not log.stat().st_mode & OTHERS
    assert "not logged" in configure(log_requests=False).text


def test_files_of_jobs_are_private_and_time_without_work_is_idle(server: Server) -> None:
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in server.jobs_dir.rglob("*")}
    assert {"jobs.sqlite", "jobs.sqlite-wal", "jobs.sqlite-shm", "lock"} <= set(found)
    assert not {name: oct(mode) for name, mode in found.items() if mode & OTHERS}
    text = requests.get(f"{server.url}/metrics", timeout=10).text
    assert 'sgl_batch:part_seconds_total{part="idle"}' in text
    assert 'part="waiting"' not in text
