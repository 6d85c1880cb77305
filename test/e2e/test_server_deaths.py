"""A job ends with one line for each of its requests, whoever was killed in the middle of it."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import requests

from .conftest import STOPS_WITHIN_S, Server, chat_line

pytestmark = pytest.mark.engine

WITHIN_S = 120
# They end one after another, over some seconds.
LINES = [chat_line(f"line {n}", f"Say {n}.", max_tokens=14 * n + 1, ignore_eos=True, temperature=0) for n in range(24)]


def create(server: Server) -> str:
    """A job of `LINES`."""
    data = "".join(json.dumps(line) + "\n" for line in LINES).encode()
    form = {"files": {"file": ("in.jsonl", data)}, "data": {"purpose": "batch"}}
    file = requests.post(f"{server.url}/v1/files", **form, timeout=30).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return str(requests.post(f"{server.url}/v1/batches", json=body, timeout=30).json()["id"])


def until(server: Server, job_id: str, is_reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + WITHIN_S
    while True:
        job: dict[str, Any] = requests.get(f"{server.url}/v1/batches/{job_id}", timeout=30).json()
        if is_reached(job):
            return job
        assert time.monotonic() < deadline, job
        time.sleep(0.02)


def engine_of(server: Server) -> psutil.Process:
    """The process that has the engine."""
    [engine] = psutil.Process(server.process.pid).children()
    return engine


def runs(process: psutil.Process) -> bool:
    """Whether it runs; a zombie has ended and waits for its parent, which is none of the server's processes."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_every_line_has_one_record_though_engine_and_server_are_killed_and_the_last_leaves_no_process(
    start_server: Callable[..., Server],
) -> None:
    server = start_server()
    job_id = create(server)
    until(server, job_id, lambda job: job["request_counts"]["completed"] >= 5)
    engine = engine_of(server)
    tree = [engine, *engine.children(recursive=True)]
    engine.kill()
    _, left = psutil.wait_procs(tree, timeout=STOPS_WITHIN_S)
    assert not left, "the engine's other processes end with it"
    before = until(server, job_id, lambda job: job["x_sgl_batch"]["engine"] == "ready")
    assert before["status"] == "in_progress"
    until(server, job_id, lambda job: job["request_counts"]["completed"] > before["request_counts"]["completed"])
    engine = engine_of(server)
    tree = [engine, *engine.children(recursive=True)]
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    _, left = psutil.wait_procs(tree, timeout=STOPS_WITHIN_S)
    assert not left, "the engine ends with its server"

    server = start_server(jobs_dir=server.jobs_dir)
    job = until(server, job_id, lambda job: job["status"] == "completed")
    assert job["request_counts"] == {"total": len(LINES), "completed": len(LINES), "failed": 0}
    text = requests.get(f"{server.url}/v1/files/{job['output_file_id']}/content", timeout=30).text
    output = [json.loads(line) for line in text.splitlines()]
    assert [line["custom_id"] for line in output] == [line["custom_id"] for line in LINES]
    tokens = [line["response"]["body"]["usage"]["completion_tokens"] for line in output]
    assert tokens == [line["body"]["max_tokens"] for line in LINES]
    one = requests.post(f"{server.url}/v1/chat/completions", json=LINES[7]["body"], timeout=30).json()
    assert output[7]["response"]["body"]["choices"] == one["choices"]
    assert Counter(line["id"] for line in output).most_common(1)[0][1] == 1
    tree = psutil.Process(server.process.pid).children(recursive=True)
    assert len(tree) >= 3, "the engine's process, its scheduler and its detokenizer"
    assert server.stop() == 0, "idle by now, it stops within seconds"
    assert not [one for one in tree if runs(one)], "when the server's process has ended, so has every other"
