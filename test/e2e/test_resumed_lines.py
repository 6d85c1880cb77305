"""Lines that an engine had begun when it died go on from their tokens, and end as if nothing had happened."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import requests

from .conftest import MODEL, Server, chat_line

pytestmark = pytest.mark.engine

WITHIN_S = 60
TOKENS = 400


def line(name: str, **body: Any) -> dict[str, Any]:
    return chat_line(name, f"Tell me about {name}.", **{"max_tokens": TOKENS, "ignore_eos": True, **body})


LINES = [
    line("greed", temperature=0),
    line("chance", temperature=1, seed=7),
    line("the nucleus", temperature=1, top_p=0.9, top_k=40, seed=8),
    line("penalties", temperature=1, seed=9, frequency_penalty=0.4, presence_penalty=0.2, repetition_penalty=1.1),
    line("a minimum", temperature=1, seed=10, min_tokens=300, ignore_eos=False),
    line("three choices", temperature=1, seed=11, n=3, max_tokens=120),
    line("probabilities", temperature=0, logprobs=True, max_tokens=120),
]
STORE = ("--max-total-tokens", "1536", "--kv-store-bytes", "64M", "--decode-kv", "resident")


def begin(server: Server, lines: list[dict[str, Any]]) -> str:
    """A job of `lines`."""
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    form = {"files": {"file": ("in.jsonl", data)}, "data": {"purpose": "batch"}}
    file = requests.post(f"{server.url}/v1/files", **form, timeout=30).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return str(requests.post(f"{server.url}/v1/batches", json=body, timeout=30).json()["id"])


def job_of(server: Server, job_id: str) -> dict[str, Any]:
    job: dict[str, Any] = requests.get(f"{server.url}/v1/batches/{job_id}", timeout=30).json()
    return job


def answers(server: Server, job: dict[str, Any]) -> dict[str, Any]:
    """What was answered to each line: its choices and its usage."""
    text = requests.get(f"{server.url}/v1/files/{job['output_file_id']}/content", timeout=30).text
    records = [json.loads(line) for line in text.splitlines()]
    bodies = {record["custom_id"]: record["response"]["body"] for record in records}
    return {name: (body["choices"], body["usage"]) for name, body in bodies.items()}


def counted(server: Server, name: str) -> float:
    """A number of /metrics; 0 before it is there."""
    for text in requests.get(f"{server.url}/metrics", timeout=30).text.splitlines():
        if text.startswith(f"sgl_batch:{name}_total "):
            return float(text.split()[1])
    return 0.0


def until(is_reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not is_reached():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def completed(server: Server, job_id: str) -> dict[str, Any]:
    until(lambda: job_of(server, job_id)["status"] == "completed")
    return job_of(server, job_id)


@pytest.mark.parametrize("flags", [(), STORE], ids=["device", "store"])
def test_a_job_whose_scheduler_is_killed_keeps_its_tokens(start_server: Callable[..., Server], flags: Any) -> None:
    server = start_server("--page-size", "16", *flags)
    a = time.monotonic()
    undisturbed = answers(server, completed(server, begin(server, LINES)))
    print("undisturbed", time.monotonic() - a)
    job_id = begin(server, LINES)
    before = counted(server, "engine_output_tokens")
    until(lambda: counted(server, "engine_output_tokens") > before + 250 * 5)
    [scheduler] = [
        child for child in psutil.Process(server.process.pid).children(recursive=True) if "scheduler" in child.name()
    ]
    scheduler.kill()
    a = time.monotonic()
    job = completed(server, job_id)
    print("resumed", time.monotonic() - a)
    for name in ("engine_deaths", "lines_rerun", "lines_resumed", "tokens_resumed", "engine_tokens_resumed"):
        print(name, counted(server, name))
    found = answers(server, job)
    for name, (choices, usage) in undisturbed.items():
        same = found[name] == (choices, usage)
        print(name, same, usage["completion_tokens"])
    assert found == undisturbed
