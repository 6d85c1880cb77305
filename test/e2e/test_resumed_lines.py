"""Lines that are running when an engine dies resume from their partial outputs, and their answers do not change."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import requests

from .conftest import MODEL, Server, chat_line

pytestmark = pytest.mark.engine

WITHIN_S = 120
TOKENS = 400
# SGLang reports tokens of a sequence when it has this many new ones.
PART = 50


def line(name: str, **body: Any) -> dict[str, Any]:
    return chat_line(name, f"Tell me about {name}.", **{"max_tokens": TOKENS, "ignore_eos": True, **body})


LINES = [
    line("greed", temperature=0),
    line("chance", temperature=1, seed=7),
    line("penalties", temperature=1, seed=9, top_p=0.9, frequency_penalty=0.4, min_tokens=TOKENS - 10),
]
# These begin again: their partial outputs lack choices or log probabilities.
WHOLE = [
    line("two choices", temperature=1, seed=11, n=2),
    line("probabilities", temperature=0, logprobs=True),
]
STORE = ("--max-total-tokens", "1024", "--kv-store-bytes", "64M", "--decode-kv", "resident")


def begin(server: Server, lines: list[dict[str, Any]]) -> str:
    """Create a job of `lines` and return its id."""
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    form = {"files": {"file": ("in.jsonl", data)}, "data": {"purpose": "batch"}}
    file = requests.post(f"{server.url}/v1/files", **form, timeout=30).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return str(requests.post(f"{server.url}/v1/batches", json=body, timeout=30).json()["id"])


def answers(server: Server, job_id: str) -> dict[str, Any]:
    """Wait for the end of the job and return the choices and the usage of each line."""

    def job() -> dict[str, Any]:
        found: dict[str, Any] = requests.get(f"{server.url}/v1/batches/{job_id}", timeout=30).json()
        return found

    until(lambda: job()["status"] == "completed")
    text = requests.get(f"{server.url}/v1/files/{job()['output_file_id']}/content", timeout=30).text
    bodies = {one["custom_id"]: one["response"]["body"] for one in map(json.loads, text.splitlines())}
    return {name: (body["choices"], body["usage"]) for name, body in bodies.items()}


def metric(server: Server, name: str) -> float:
    """Return a number of /metrics; 0 before it exists."""
    for text in requests.get(f"{server.url}/metrics", timeout=30).text.splitlines():
        if text.startswith((f"sgl_batch:{name} ", f"sgl_batch:{name}_total ")):
            return float(text.split()[1])
    return 0.0


def until(is_reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not is_reached():
        assert time.monotonic() < deadline, "the condition was not reached in time"
        time.sleep(0.02)


def begun(server: Server, lines: list[dict[str, Any]]) -> str:
    """Create a job and wait until each line has more than PART tokens: a request that came later has so many."""
    job_id = begin(server, lines)
    until(lambda: metric(server, "num_lines_in_flight") == len(lines))
    body = {"model": MODEL, "prompt": "While they run", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    with requests.post(f"{server.url}/v1/completions", json=body, stream=True, timeout=WITHIN_S) as answer:
        parts: Iterator[bytes] = (part for part in answer.iter_lines() if part.startswith(b"data:"))
        for _ in range(PART + 10):
            next(parts)
    return job_id


def tree_of(server: Server) -> tuple[psutil.Process, psutil.Process]:
    """Return the engine's process and its scheduler."""
    [engine] = psutil.Process(server.process.pid).children()
    [scheduler] = [child for child in engine.children(recursive=True) if "scheduler" in child.name()]
    return engine, scheduler


Undisturbed = Callable[[Server], dict[str, Any]]


@pytest.fixture(scope="module")
def undisturbed() -> Undisturbed:
    """Return a function that gives the answers to `LINES` while no process dies; they are the same with a store."""
    made: dict[str, Any] = {}

    def ask(server: Server) -> dict[str, Any]:
        if not made:
            made.update(answers(server, begin(server, LINES)))
        return made

    return ask


def stopping(whole: str) -> tuple[dict[str, Any], str]:
    """Return the line "chance" with a stop string that comes late in its answer, and its answer then."""
    cut = len(whole) * 4 // 5
    while whole.index(whole[cut : cut + 12]) < cut:
        cut += 1
    stopped = {**LINES[1], "custom_id": "chance, stopped", "body": {**LINES[1]["body"], "stop": whole[cut : cut + 12]}}
    return stopped, whole[:cut]


def test_lines_keep_their_tokens_when_the_scheduler_is_killed(
    start_server: Callable[..., Server], undisturbed: Undisturbed
) -> None:
    server = start_server("--page-size", "16", "--boundary-tokens", "16")
    expected = undisturbed(server)
    stopped, text = stopping(expected["chance"][0][0]["message"]["content"])
    job_id = begun(server, [*LINES, stopped])
    tree_of(server)[1].kill()
    found = answers(server, job_id)
    [choice], usage = found.pop("chance, stopped")
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert PART < usage["completion_tokens"] < TOKENS
    assert found == expected
    assert metric(server, "lines_resumed") == metric(server, "lines_rerun") == len(LINES) + 1
    resumed = metric(server, "tokens_resumed")
    assert (len(LINES) + 1) * PART <= resumed < (len(LINES) + 1) * TOKENS
    until(lambda: metric(server, "engine_tokens_resumed") == resumed)  # the engine is asked once a second
    assert metric(server, "recorded_tokens") == 0


def test_lines_keep_their_tokens_when_the_whole_engine_is_killed_with_kv_in_a_store(
    start_server: Callable[..., Server], undisturbed: Undisturbed
) -> None:
    server = start_server("--page-size", "16", "--boundary-tokens", "16", "--allow-unauthenticated-control", *STORE)
    expected = undisturbed(server)
    job_id = begun(server, [*LINES, *WHOLE])
    requests.post(f"{server.url}/pause_generation", json={"mode": "in_place"}, timeout=30).raise_for_status()
    until(lambda: metric(server, "recorded_tokens") >= len(LINES) * PART)
    recorded = metric(server, "recorded_tokens")
    tree_of(server)[0].kill()
    found = answers(server, job_id)
    assert {name: found[name] for name in expected} == expected
    assert [found[name][1]["completion_tokens"] for name in ("two choices", "probabilities")] == [2 * TOKENS, TOKENS]
    assert metric(server, "lines_rerun") == len(LINES) + len(WHOLE)
    assert metric(server, "lines_resumed") == len(LINES)
    assert metric(server, "tokens_resumed") == recorded
