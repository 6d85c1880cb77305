"""A job ends with one result line for each request, whichever process was killed while it ran."""

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
# They end one after the other, over some seconds.
LINES = [chat_line(f"line {n}", f"Say {n}.", max_tokens=14 * n + 1, ignore_eos=True, temperature=0) for n in range(24)]


def create(server: Server) -> str:
    """Create a job of `LINES` and return its id."""
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
    """Return the engine's process."""
    [engine] = psutil.Process(server.process.pid).children()
    return engine


def runs(process: psutil.Process) -> bool:
    """Return whether a process runs. A zombie has ended; its parent is not one of the server's processes."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_every_line_has_one_result_after_engine_and_server_are_killed_and_a_stopped_server_leaves_no_process(
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
    assert server.stop() == 0, "an idle server stops within seconds"
    assert not [one for one in tree if runs(one)], "all processes end before the server's own"
