"""The command shows a server's instances, and says why a request was refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sgl_batch.cli.instances.command import instances_command

ROW = {
    "name": "i1",
    "node": "big (10.0.0.7)",
    "phase": "ready",
    "message": None,
    "cores": 4,
    "gpus": 1,
    "incarnation": 2,
    "in_flight": 1200,
    "answered": 3,
    "lines_per_s": 1.54,
}
WAITING = {**ROW, "name": "i2", "node": "", "phase": "waiting", "message": "no node has room", "lines_per_s": 0.0}


class Answers(BaseHTTPRequestHandler):
    """Answers as a server does; `seen` has the requests."""

    seen: list[tuple[str, str, str | None]]

    def answer(self) -> None:
        self.seen.append((self.command, self.path, self.headers["Authorization"]))
        status, body = self.reply()
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    do_GET = do_POST = do_DELETE = answer

    def reply(self) -> tuple[int, dict[str, Any]]:
        if self.path.endswith("/i9"):
            return 404, {"error": {"message": "there is no instance 'i9' (there are: i1)"}}
        if self.path.endswith("instances") and self.command == "GET":
            gone = sum(seen[0] == "DELETE" for seen in self.seen)
            return 200, {"object": "list", "data": [ROW, WAITING][gone:]}
        return 200, ROW

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, list[tuple[str, str, str | None]]]]:
    handler = type("Handler", (Answers,), {"seen": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}/v1", handler.seen
        running.shutdown()


def test_the_table_shows_rate_and_state(
    server: tuple[str, list[tuple[str, str, str | None]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert instances_command(["list", "--base-url", server[0], "--admin-api-key", "a"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "name  node            state    cores  GPUs  start  in flight  answered  lines/s",
        "i1    big (10.0.0.7)  ready        4     1      2      1,200         3      1.5",
        "i2    -               waiting      4     1      2      1,200         3        -",
        "i2: no node has room",
    ]
    assert server[1] == [("GET", "/v1/sgl_batch/instances", "Bearer a")]


def test_the_key_comes_from_the_environment_too(
    server: tuple[str, list[tuple[str, str, str | None]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SGL_BATCH_ADMIN_API_KEY", "env")
    assert instances_command(["add", "--base-url", server[0]]) == 0
    assert instances_command(["drain", "i1", "--base-url", server[0]]) == 0
    assert server[1] == [
        ("POST", "/v1/sgl_batch/instances", "Bearer env"),
        ("POST", "/v1/sgl_batch/instances/i1/drain", "Bearer env"),
    ]
    assert capsys.readouterr().out == "i1\ni1\n"


def test_a_removal_is_waited_for(server: tuple[str, list[tuple[str, str, str | None]]]) -> None:
    assert instances_command(["remove", "i1", "--wait", "--base-url", server[0]]) == 0
    assert [method for method, _, _ in server[1]] == ["DELETE", "GET"]


def test_a_refusal_is_the_servers_own_words(
    server: tuple[str, list[tuple[str, str, str | None]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert instances_command(["remove", "i9", "--base-url", server[0]]) == 1
    assert "there is no instance 'i9'" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert instances_command(["list", "--base-url", "http://127.0.0.1:9/v1"]) == 3
    assert "the server http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err
