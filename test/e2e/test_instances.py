"""A server with several instances answers each line once, also when an instance is killed."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import requests

from .conftest import Server, chat_line

pytestmark = pytest.mark.engine

WITHIN_S = 120
ADMIN = {"Authorization": "Bearer admin"}
LINES = [chat_line(f"line {n}", f"Say {n}.", max_tokens=8 * n + 1, ignore_eos=True, temperature=0) for n in range(40)]


def until(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WITHIN_S
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return found


def instances(server: Server) -> dict[str, dict[str, Any]]:
    rows = requests.get(f"{server.url}/v1/sgl_batch/instances", headers=ADMIN, timeout=30).json()["data"]
    return {one["name"]: one for one in rows}


def actors(server: Server) -> list[psutil.Process]:
    """Return the processes of the server's instances."""
    found = psutil.Process(server.process.pid).children(recursive=True)
    return [one for one in found if any("InstanceActor" in word for word in one.cmdline())]


def test_every_line_has_one_result_although_an_instance_is_killed(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    server = start_server("--instances", "2", "--admin-api-key", "admin")
    until(lambda: [one["phase"] for one in instances(server).values()] == ["ready", "ready"])
    assert {one["cores"] for one in instances(server).values()} == {(os.cpu_count() or 2) // 2}
    said = requests.post(f"{server.url}/v1/chat/completions", json=chat_line("x", "Hello.")["body"], timeout=60)
    assert said.json()["usage"]["completion_tokens"], "an instance on this machine answers SGLang's endpoints"
    assert requests.post(f"{server.url}/flush_cache", headers=ADMIN, timeout=30).status_code == 501
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    file = client.files.create(file=path, purpose="batch")
    job = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    until(lambda: client.batches.retrieve(job.id).request_counts.completed >= 5)
    assert sum(one["in_flight"] > 0 for one in instances(server).values()) == 2
    actors(server)[0].kill()
    done = until(lambda: (now := client.batches.retrieve(job.id)).status == "completed" and now)
    assert (done.request_counts.completed, done.request_counts.failed) == (len(LINES), 0)
    results = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    assert Counter(one["custom_id"] for one in results) == Counter(line["custom_id"] for line in LINES)
    tokens = [one["response"]["body"]["usage"]["completion_tokens"] for one in results]
    assert tokens == [line["body"]["max_tokens"] for line in LINES]
    until(lambda: sorted(one["incarnation"] for one in instances(server).values()) == [1, 2])
    below = psutil.Process(server.process.pid).children(recursive=True)
    assert server.stop() == 0
    _, left = psutil.wait_procs(below, timeout=15)
    assert not left, "nothing of a cluster of its own is left behind"
