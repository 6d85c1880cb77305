"""Hostile requests do a real server no harm, and nothing of it is open to other machines and users."""

from __future__ import annotations

import base64
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from safetensors.torch import load_file, save

from .conftest import MODEL, Server
from .reachable import exposed_to_others, listening, tree_of

pytestmark = pytest.mark.engine

KEY, ADMIN_KEY = "the-users-key", "the-admins-key"
USER, ADMIN = ({"Authorization": f"Bearer {key}"} for key in (KEY, ADMIN_KEY))
WEIGHTS = Path(__file__).parents[1] / "models" / "tiny-qwen3-moe" / "model.safetensors"


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    jobs_dir = tmp_path_factory.mktemp("open") / "jobs"
    jobs_dir.mkdir(mode=0o755)
    flags = ("--api-key", KEY, "--admin-api-key", ADMIN_KEY, "--enable-metrics")
    return start_server(*flags, jobs_dir=jobs_dir)


def update(server: Server, payload: bytes, load_format: str | None = None, **headers: str) -> requests.Response:
    body = {"serialized_named_tensors": [base64.b64encode(payload).decode()], "load_format": load_format}
    return requests.post(f"{server.url}/update_weights_from_tensor", json=body, headers=headers, timeout=60)


def answer(server: Server) -> Any:
    body = {"model": MODEL, "prompt": "Return the", "max_tokens": 16, "temperature": 0}
    return requests.post(f"{server.url}/v1/completions", json=body, headers=USER, timeout=60).json()["choices"][0][
        "text"
    ]


def test_a_pickled_program_sent_as_weights_is_not_run(server: Server, tmp_path: Path) -> None:
    system = b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(Vos\ntRVsystem\ntR"
    attack = pickle.PROTO + b"\4" + system + f"(Vtouch {tmp_path}/done\ntR.".encode()
    before = answer(server)
    assert update(server, attack).status_code == update(server, attack, **USER).status_code == 401
    refused = update(server, attack, **ADMIN)
    assert refused.status_code == 400
    assert "builtins.getattr, which tensors do not need" in refused.json()["message"]
    assert not (tmp_path / "done").exists()
    assert answer(server) == before


def test_weights_can_be_updated_as_safetensors_over_http(server: Server) -> None:
    before = answer(server)
    other = {name: weight * (0.5 if "norm" in name else 1.5) for name, weight in load_file(WEIGHTS).items()}
    assert update(server, save(other), "safetensors", **ADMIN).json()["success"]
    assert answer(server) != before
    assert update(server, WEIGHTS.read_bytes(), "safetensors", **ADMIN).json()["success"]
    assert answer(server) == before


def test_a_request_smuggled_behind_an_ambiguous_one_is_not_answered(server: Server) -> None:
    address = urlsplit(server.url)
    hidden = f"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n\r\n"
    first = "POST /health HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=20) as client:
        client.sendall(f"{first}Content-Length: {len(hidden) + 5}\r\n\r\n0\r\n\r\n{hidden}".encode())
        found = b"".join(iter(lambda: client.recv(65536), b""))
    assert found.startswith(b"HTTP/1.1 400 ")
    assert found.count(b"HTTP/1.1") == 1
    assert MODEL.encode() not in found


def test_without_a_key_only_probes_are_answered(server: Server) -> None:
    for path, status in (("/health", 200), ("/ping", 200), ("/metrics", 401), ("/health_generate", 401)):
        assert requests.get(server.url + path, timeout=60).status_code == status, path
        assert requests.get(server.url + path, headers=USER, timeout=60).status_code == 200, path


def test_the_engines_own_port_answers_only_the_server(server: Server) -> None:
    [engine] = [process for process in tree_of(server.process.pid) if "sgl_batch.launch_engine" in process.cmdline()]
    [(host, port)] = set(listening(engine))
    for path in ("/health", "/health_generate", "/metrics", "/v1/models", "/flush_cache", "/openapi.json"):
        for method, headers in (("GET", {}), ("OPTIONS", {}), ("GET", USER), ("GET", ADMIN)):
            found = requests.request(method, f"http://{host}:{port}{path}", headers=headers, timeout=60)
            assert found.status_code == 401, (method, path)


def test_nothing_of_a_server_is_open_to_other_machines_and_users(server: Server) -> None:
    assert exposed_to_others(server.process.pid) == []
    files = [path for path in server.jobs_dir.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if path.stat().st_mode & 0o077] == []
