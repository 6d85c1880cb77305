"""A server with several instances answers each line once, also when an instance is killed."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


def control(server: Server, path: str, **body: Any) -> dict[str, Any]:
    """Send a request to all instances, and return the answer for all."""
    answer = requests.post(f"{server.url}{path}", json=body, headers=ADMIN, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert found["success"]
    assert sorted(found["instances"]) == ["i1", "i2"]
    return found


def check_endpoints(client: openai.OpenAI) -> None:
    """Ask for an answer as a whole and as a stream, of both instances: equal requests go to them in turn."""
    body: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
    messages: Any = [{"role": "user", "content": "Hello."}]
    answers = [client.chat.completions.create(messages=messages, **body) for _ in range(2)]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    for _ in range(2):
        events = list(client.chat.completions.create(messages=messages, stream=True, **body))
        text = "".join(event.choices[0].delta.content or "" for event in events)
        assert text == answers[0].choices[0].message.content
        assert len(events) > 2


def check_control(server: Server, model: Path) -> None:
    """Pause all instances under a request, load weights, and go on."""
    asked = {"text": "Say.", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    control(server, "/pause_generation", mode="retract")
    with ThreadPoolExecutor(2) as clients:
        answers = [clients.submit(requests.post, f"{server.url}/generate", json=asked, timeout=60) for _ in range(2)]
        done = control(server, "/update_weights_from_disk", model_path=str(model), weight_version="7")
        assert done["weight_version"] == "7"
        assert not any(one.done() for one in answers), "both instances are paused"
        control(server, "/continue_generation")
        for one in answers:
            assert one.result().json()["meta_info"]["weight_version"] == "7"
    refused = requests.post(f"{server.url}/init_weights_update_group", json={}, headers=ADMIN, timeout=30)
    assert refused.status_code == 501


def test_every_line_has_one_result_although_an_instance_is_killed(
    start_server: Callable[..., Server], tmp_path: Path, repo_root: Path
) -> None:
    server = start_server("--instances", "2", "--admin-api-key", "admin")
    until(lambda: [one["phase"] for one in instances(server).values()] == ["ready", "ready"])
    assert {one["cores"] for one in instances(server).values()} == {(os.cpu_count() or 2) // 2}
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    check_endpoints(client)
    check_control(server, repo_root / "test" / "models" / "tiny-qwen3-moe")
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
    # Each answer says of which weights it is, also those that began in the killed instance or ended in the next one.
    assert {one["response"]["body"]["metadata"]["weight_version"] for one in results} == {"7"}
    until(lambda: sorted(one["incarnation"] for one in instances(server).values()) == [1, 2])
    until(lambda: {one["phase"] for one in instances(server).values()} == {"ready"})
    assert control(server, "/flush_cache")["weight_version"] == "7", "the new engine has the weights of the other one"
    below = psutil.Process(server.process.pid).children(recursive=True)
    assert server.stop() == 0
    _, left = psutil.wait_procs(below, timeout=15)
    assert not left, "nothing of a cluster of its own is left behind"
