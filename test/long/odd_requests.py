"""Owns the odd requests of a long run against a server: their kinds, and the answers that are allowed.

It starts nothing and measures nothing.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import requests

MODEL = "tiny"
TIMEOUT_S = 120
Kind = Callable[[str, random.Random], int]
"""Sends one odd request to a base URL; returns the status, or 0 if the client disconnected before there was one."""

_BODIES: tuple[bytes, ...] = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"model": 3}',
    b'{"model": "tiny", "prompt": {}}',
    b'{"model": "tiny", "prompt": "x", "max_tokens": -1}',
    b'{"model": "tiny", "prompt": "x", "n": 100000}',
    b'{"model": "tiny", "prompt": "x", "temperature": 1e400}',
    b'{"model": "tiny", "prompt": "x", "stop": [' + b'"a",' * 999 + b'"a"]}',
    b"[" * 20_000,
    b'{"model": "tiny", "prompt": "\\ud800"}',
)
_PATHS = ("/v1/none", "/v1/files/file-none", "/v1/batches/batch_none", "/%00", "/a" * 500, "/v1/../admin", "//")


def hostile_body(url: str, dice: random.Random) -> int:
    """Send an invalid body to an endpoint of the service or of the engine."""
    path = dice.choice(("/v1/completions", "/v1/chat/completions", "/v1/batches", "/generate", "/v1/files"))
    headers = {"Content-Type": "application/json"}
    return requests.post(url + path, data=dice.choice(_BODIES), headers=headers, timeout=TIMEOUT_S).status_code


def huge_list(url: str, dice: random.Random) -> int:
    """Send a list of tokens, prompts or stop strings that is far too long."""
    length = dice.randint(10_000, 100_000)
    body: dict[str, Any] = dice.choice(
        (
            {"prompt": [1] * length},
            {"prompt": [[-1]] * (length // 10)},
            {"prompt": "x " * length},
            {"prompt": "x", "logit_bias": {str(number): 1 for number in range(length // 10)}},
            {"prompt": "x", "max_tokens": 1, "stop": ["y"] * length},
        )
    )
    answer = requests.post(f"{url}/v1/completions", json={"model": MODEL, **body}, timeout=TIMEOUT_S)
    return answer.status_code


def unknown_path(url: str, dice: random.Random) -> int:
    """Ask for a path that does not exist, another one each time."""
    path = f"{dice.choice(_PATHS)}{dice.random()}"
    return requests.request(dice.choice(("GET", "POST", "PUT", "DELETE")), url + path, timeout=TIMEOUT_S).status_code


def half_open_body(url: str, dice: random.Random) -> int:
    """Send a part of a body and disconnect."""
    host = urlsplit(url)
    path = dice.choice(("/v1/files", "/v1/completions", "/v1/batches", "/generate"))
    kind = "multipart/form-data; boundary=b" if path == "/v1/files" else "application/json"
    head = f"POST {path} HTTP/1.1\r\nHost: {host.netloc}\r\nContent-Type: {kind}\r\nContent-Length: 1000000\r\n\r\n"
    with socket.create_connection((str(host.hostname), host.port or 80), timeout=TIMEOUT_S) as connection:
        connection.sendall(head.encode() + b'--b\r\n{"model": "' + b"x" * dice.randint(0, 200_000))
    return 0


def aborted_stream(url: str, dice: random.Random) -> int:
    """Read the first chunks of a stream and disconnect."""
    body = {"model": MODEL, "prompt": f"Say {dice.random()}", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    with requests.post(f"{url}/v1/completions", json=body, stream=True, timeout=TIMEOUT_S) as answer:
        for number, _ in enumerate(answer.iter_lines()):
            if number >= dice.randint(0, 5):
                break
    return answer.status_code


def refused_lines(url: str, dice: random.Random) -> int:
    """Create a job whose lines are refused, each by itself or all together."""
    whole = dice.random() < 0.5
    body: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 1 if whole else -1}
    lines = [
        {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body} for number in range(20)
    ]
    if whole:
        lines[7] = {"custom_id": "r1"}
    return _job(url, lines, dice)


def small_job(url: str, dice: random.Random) -> int:
    """Create a job with one line; some are cancelled at once."""
    body = {"model": MODEL, "prompt": f"Say {dice.random()}", "max_tokens": 1}
    return _job(url, [{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}], dice)


def _job(url: str, lines: list[dict[str, Any]], dice: random.Random) -> int:
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    form: dict[str, Any] = {"files": {"file": ("in.jsonl", data)}, "data": {"purpose": "batch"}}
    file = requests.post(f"{url}/v1/files", **form, timeout=TIMEOUT_S).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    made = requests.post(f"{url}/v1/batches", json=body, timeout=TIMEOUT_S)
    if dice.random() < 0.3:
        requests.post(f"{url}/v1/batches/{made.json()['id']}/cancel", timeout=TIMEOUT_S)
    return made.status_code


# Kinds, and how often of a hundred requests each comes.
KINDS: tuple[tuple[Kind, int], ...] = (
    *((hostile_body, 30), (huge_list, 5), (unknown_path, 25), (half_open_body, 15)),
    *((aborted_stream, 10), (refused_lines, 5), (small_job, 10)),
)


def is_allowed(status: int) -> bool:
    """Return whether a status means an answer or a refusal, and no fault of the server."""
    return status < 500


def one_request(url: str, number: int) -> tuple[str, int]:
    """Send the odd request of this number; return its kind and status. A number always gives the same request."""
    dice = random.Random(number)
    kind = dice.choices([kind for kind, _ in KINDS], [weight for _, weight in KINDS])[0]
    return kind.__name__, kind(url, dice)
