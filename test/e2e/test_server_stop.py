"""A server that gets SIGTERM takes no more requests and answers those it has.

test_server_deaths.py tests that an idle server stops within seconds.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator

import pytest
import requests

from .conftest import MODEL, STOPS_WITHIN_S, Server

pytestmark = pytest.mark.engine

NUM_TOKENS, NUM_CHOICES = 400, 2


def stream(server: Server) -> Iterator[dict[str, object]]:
    """Yield the chunks of a completion with several choices."""
    body = {"model": MODEL, "prompt": "Return the", "max_tokens": NUM_TOKENS, "n": NUM_CHOICES, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    answer = requests.post(f"{server.url}/v1/completions", json=body, stream=True, timeout=120)
    for line in answer.iter_lines():
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


def test_a_server_that_is_asked_to_stop_answers_its_requests(start_server: Callable[[], Server]) -> None:
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
