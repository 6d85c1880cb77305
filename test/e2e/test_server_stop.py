"""A server that is asked to stop takes no more requests, answers those it has, and leaves nothing behind."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator

import psutil
import pytest
import requests

from .conftest import MODEL, STOPS_WITHIN_S, Server

pytestmark = pytest.mark.engine

NUM_TOKENS, NUM_CHOICES = 400, 2


def stream(server: Server) -> Iterator[dict[str, object]]:
    """Chunks of a completion with several choices."""
    body = {"model": MODEL, "prompt": "Return the", "max_tokens": NUM_TOKENS, "n": NUM_CHOICES, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    answer = requests.post(f"{server.url}/v1/completions", json=body, stream=True, timeout=120)
    for line in answer.iter_lines():
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


def runs(process: psutil.Process) -> bool:
    """Whether it runs; a zombie has ended and waits for its parent, which is none of the server's processes."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_idle_server_stops_within_seconds_without_a_process_left(start_server: Callable[[], Server]) -> None:
    server = start_server()
    assert len(list(stream(server))) > NUM_CHOICES, "it has served choices before it is idle"
    tree = psutil.Process(server.process.pid).children(recursive=True)
    assert len(tree) >= 3, "the engine's process, its scheduler and its detokenizer"
    assert server.stop() == 0
    assert not [one for one in tree if runs(one)], "when the server's process has ended, so has every other"


def test_a_server_that_is_asked_to_stop_answers_what_it_has(start_server: Callable[[], Server]) -> None:
    server = start_server()
    chunks = stream(server)
    first = next(chunks)
    server.process.send_signal(signal.SIGTERM)
    rest = list(chunks)
    assert first["usage"] is None
    assert rest[-1]["usage"]["completion_tokens"] == NUM_CHOICES * NUM_TOKENS
    reasons = [choice["finish_reason"] for chunk in rest for choice in chunk["choices"] if choice["finish_reason"]]
    assert reasons == ["length"] * NUM_CHOICES
    assert server.process.wait(timeout=STOPS_WITHIN_S) == 0
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{server.url}/health", timeout=5)
