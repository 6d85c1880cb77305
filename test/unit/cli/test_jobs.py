"""`sgl-batch jobs` against the real app and service with a scripted engine: output, files and exit codes."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from running_service import line
from scripted_engines import ScriptedSource, refusal
from served_app import served

from sgl_batch.api.app import make_app
from sgl_batch.api.auth import AccessRules
from sgl_batch.api.pass_through import PassThrough
from sgl_batch.api.supervisor import EngineSupervisor
from sgl_batch.cli.jobs.command import jobs_command
from sgl_batch.cli.jobs.watching import ChangesDisplay, Waiting, watch
from sgl_batch.jobs.batch_service.service import BatchService
from sgl_batch.jobs.batch_service.settings import ServiceSettings

KEY = "users"


class Running:
    """A server in a thread of its own. Lines whose prompt is `hold` are answered when it releases them."""

    def __init__(self, directory: Path) -> None:
        self.url = ""
        self._directory = directory
        self._ready, self._end, self._let_go = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def let_go(self) -> None:
        self._let_go.set()

    async def _script(self, engine: object, body: Any) -> Any:
        if body["prompt"] == "refuse":
            return refusal()
        while body["prompt"] == "hold" and not self._let_go.is_set():
            await asyncio.sleep(0.005)
        return None

    async def _serve(self) -> None:
        supervisor = EngineSupervisor(("never-started",), self._directory, stall_s=0, restart_stalled=False)
        source = ScriptedSource(self._script)
        service = BatchService(ServiceSettings(jobs_dir=self._directory / "jobs"), source, tick_s=0.01)
        engine = PassThrough(supervisor.endpoints, lambda: supervisor.state)
        rules = AccessRules(api_key=KEY, admin_api_key=None, host="127.0.0.1")
        await service.start()
        async with served(make_app(service, supervisor, engine, rules)) as url:
            self.url = f"{url}/v1"
            self._ready.set()
            await asyncio.to_thread(self._end.wait)
        await service.stop()

    def __enter__(self) -> Running:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()
        self._end.set()
        self._thread.join()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    with Running(tmp_path) as running:
        monkeypatch.setenv("OPENAI_BASE_URL", running.url)
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        monkeypatch.setattr("sgl_batch.cli.jobs.watching.EVERY_S", 0.01)
        monkeypatch.setattr(Waiting.__init__, "__kwdefaults__", {**Waiting.__init__.__kwdefaults__, "every_s": 0.01})
        monkeypatch.chdir(tmp_path)
        yield running


def write(*prompts: str, name: str = "in.jsonl") -> str:
    Path(name).write_text("".join(json.dumps(line(f"r{i}", prompt)) + "\n" for i, prompt in enumerate(prompts)))
    return name


def ids(name: str) -> list[str]:
    return [json.loads(one)["custom_id"] for one in Path(name).read_text().splitlines()]


def submitted(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert jobs_command(["submit", *argv]) == 0
    return capsys.readouterr().out.strip()


def test_four_commands_bring_the_answers(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    job = submitted(capsys, write("a", "refuse", "c"), "--metadata", "run=7", "--priority", "3")
    assert jobs_command(["watch", job]) == 2
    assert "2 of 3 lines ok, 1 failed" in capsys.readouterr().err
    assert jobs_command(["download", job, "-o", "out.jsonl", "--errors"]) == 0
    assert (ids("out.jsonl"), ids("out.errors.jsonl")) == (["r0", "r2"], ["r1"])
    assert jobs_command(["get", job]) == 0
    card = capsys.readouterr().out
    assert "3 of 3 done (100.0%), 1 failed" in card
    assert "run=7, priority=3" in card
    assert jobs_command(["list"]) == 0
    assert f"{job}  in.jsonl  completed" in (table := capsys.readouterr().out)
    assert table.split()[-3:-1] == ["3", "24h"], "priority and window"
    assert jobs_command(["get", job, "--json", "--price-per-hour", "3600"]) == 0
    more = json.loads(capsys.readouterr().out)["x_sgl_batch"]
    assert more["cost"]["amount"] == more["engine_time"]["seconds"]
    assert more["engine_time"]["lines"] == 3
    assert sorted(path.name for path in Path().iterdir() if path.is_file()) == [
        "in.jsonl",
        "out.errors.jsonl",
        "out.jsonl",
    ]


def test_submit_reads_standard_input_and_downloads_the_output(
    server: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stdin:
        buffer = io.BytesIO(Path(write("a", "b")).read_bytes())

    monkeypatch.setattr(sys, "stdin", Stdin)
    assert jobs_command(["submit", "-", "-o", "out.jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "completed"
    assert ids("out.jsonl") == ["r0", "r1"]
    assert jobs_command(["submit", "in.jsonl", "-o", "out.jsonl"]) == 1
    assert "exists already" in capsys.readouterr().err


def test_a_cancelled_job_can_be_continued_to_its_end(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    job = submitted(capsys, write("a", "b", "hold"))
    while True:
        assert jobs_command(["get", job, "--json"]) == 0
        if json.loads(capsys.readouterr().out)["request_counts"]["completed"] == 2:
            break
    assert jobs_command(["download", job]) == 1
    assert "--partial" in capsys.readouterr().err
    assert jobs_command(["download", job, "--partial", "-o", "head.jsonl"]) == 0
    assert ids("head.jsonl") == ["r0", "r1"]
    assert jobs_command(["continue", job]) == 1
    assert "batch_not_ended" in capsys.readouterr().err
    assert jobs_command(["cancel", job]) == 0
    assert jobs_command(["watch", job]) == 3
    server.let_go()
    assert jobs_command(["continue", job, "--wait", "-o", "out.jsonl"]) == 0
    assert ids("out.jsonl") == ["r0", "r1", "r2"]


def test_each_submission_is_a_job_of_its_own_and_all_are_listed(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    name = write("a")
    jobs = {submitted(capsys, name) for _ in range(3)}
    assert len(jobs) == 3
    assert jobs_command(["list", "--limit", "2", "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert jobs_command(["list", "--all", "--json"]) == 0
    assert {json.loads(one)["id"] for one in capsys.readouterr().out.splitlines()} == jobs


def test_the_same_idempotency_key_gives_the_same_continuation(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    job = submitted(capsys, write("a", "b"), "--wait")
    made = set()
    for _ in range(2):
        assert jobs_command(["continue", job, "--idempotency-key", "k"]) == 0
        made.add(capsys.readouterr().out.strip())
    assert len(made) == 1
    assert jobs_command(["continue", job, "--idempotency-key", "k", "--window", "1h"]) == 1
    assert "idempotency_key_reused" in capsys.readouterr().err


def test_a_job_that_fails_validation_says_why_and_exits_3(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.jsonl").write_text(json.dumps(line("a")) + "\nno JSON\n")
    assert jobs_command(["submit", "in.jsonl", "--watch"]) == 3
    err = capsys.readouterr().err
    assert "line 2:" in err
    assert "(invalid_json_line)" in err
    assert jobs_command(["submit", "in.jsonl", "-o", "out.parquet"]) == 3
    assert "has no output: it has answered no line" in capsys.readouterr().err
    assert not Path("out.parquet").exists(), "a table without rows would look like an answer"


def test_refusals_name_the_fault_the_server_and_a_remedy(
    server: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert jobs_command(["list", "--api-key", "wrong"]) == 1
    err = capsys.readouterr().err
    assert server.url in err
    assert "OPENAI_API_KEY" in err
    assert jobs_command(["get", "batch_000000000000000000000000"]) == 1
    assert "jobs list" in capsys.readouterr().err
    assert jobs_command(["list", "--base-url", server.url + "/files/x"]) == 1
    assert "has no Batches API" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert jobs_command(["list", "--base-url", f"http://127.0.0.1:{port}/v1"]) == 3
    err = capsys.readouterr().err
    assert "cannot be reached" in err
    assert "sgl-batch serve" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("end", ["", "/"])
def test_a_base_url_without_a_path_is_that_of_the_api(
    server: Running, capsys: pytest.CaptureFixture[str], end: str
) -> None:
    assert server.url.endswith("/v1")
    assert jobs_command(["list", "--base-url", server.url.removesuffix("/v1") + end]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["get", "../files"], "is not the id of a job"),
        (["submit", "none.jsonl"], "does not exist"),
        (["submit", "-", "--body", '{"max_tokens": 2}'], "--body makes requests of the rows of a table"),
        (["submit", "{}", "--metadata", "x"], "give KEY=VALUE"),
        (["list", "--limit", "0"], "at least 1"),
        (["list", "--base-url", "localhost:30000"], "not a web address"),
    ],
)
def test_bad_usage_exits_1_before_any_request(argv: list[str], message: str, capsys: Any) -> None:
    assert jobs_command(argv) == 1
    assert message in capsys.readouterr().err


def test_the_last_line_has_the_rates_of_the_whole_job() -> None:
    ended = {
        **{"id": "batch_1", "status": "completed", "in_progress_at": 1_000, "completed_at": 1_004},
        "request_counts": {"total": 3, "completed": 3, "failed": 0},
        "usage": {"input_tokens": 400, "output_tokens": 1_200},
    }
    stream = io.StringIO()
    watch(lambda: ended, ChangesDisplay(stream))
    assert "3/3 lines (100.0%)" in stream.getvalue()
    assert "in 100 tok/s, out 300 tok/s" in stream.getvalue()


def test_a_job_reads_a_table_and_writes_one(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"q": ["a", "refuse", None, "d"], "key": [5, 6, 7, 8]}), "in.parquet")
    flags = ("in.parquet", "--prompt-column", "q", "--id-column", "key", "--model", "tiny")
    assert jobs_command(["submit", *flags, "--wait", "-o", "out.parquet"]) == 2
    job = capsys.readouterr().out.strip()
    assert " in.jsonl " in listed(capsys), "it is named after the table"
    rows = pq.read_table("out.parquet").to_pylist()
    assert [(row["row"], row["custom_id"], row["status_code"]) for row in rows] == [
        *((0, "5", 200), (1, "6", 400), (2, "7", 400), (3, "8", 200))
    ]
    assert [row["error_code"] for row in rows] == [None, "context_length_exceeded", "missing_prompt", None]
    assert jobs_command(["download", job, "-o", "again.parquet"]) == 0
    assert Path("again.parquet").read_bytes() == Path("out.parquet").read_bytes()
    assert jobs_command(["download", job, "-o", "again.parquet", "--overwrite", "--errors"]) == 1
    assert "rows of the table" in capsys.readouterr().err
    assert jobs_command(["submit", *flags[:-2]]) == 3, "this server has no engine to ask for its model"
    assert "asking for the model" in capsys.readouterr().err


def test_the_table_of_a_continued_job_has_the_rows_of_the_cancelled_one(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    job = submitted(capsys, write("a", "hold", "c"))
    while "2/3" not in listed(capsys):
        pass
    assert jobs_command(["cancel", job]) == 0
    assert jobs_command(["watch", job]) == 3
    server.let_go()
    assert jobs_command(["continue", job, "--wait", "-o", "out.parquet"]) == 0
    rows = pq.read_table("out.parquet").to_pylist()
    assert [(row["row"], row["custom_id"], row["status_code"]) for row in rows] == [
        (number, f"r{number}", 200) for number in range(3)
    ]


def listed(capsys: pytest.CaptureFixture[str]) -> str:
    assert jobs_command(["list"]) == 0
    return capsys.readouterr().out
