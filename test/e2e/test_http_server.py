"""`python -m sgl_batch.launch_server`: files, jobs, SGLang's endpoints, with the real `openai` client and curl."""

from __future__ import annotations

import concurrent.futures
import json
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from bad_lines import FATAL_BODIES, FATAL_GENERATIONS, good_line, make_line, make_request

from .conftest import MODEL, Server, chat_line, collect, run_argv

pytestmark = pytest.mark.engine

KEY, ADMIN_KEY = "the-users-key", "the-admins-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
SAME = chat_line("same", "What does os.path.join do?", temperature=0.8, seed=3, n=2, logprobs=True)
VARYING = {"id", "created"}
MODEL_PATH = Path(__file__).parents[1] / "models" / "tiny-qwen3-moe"
WITHIN_S = 60


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("keys") / "admin"
    file.write_text(f"{ADMIN_KEY}\n")
    return start_server("--api-key", KEY, "--admin-api-key-file", str(file), "--enable-metrics").url


@pytest.fixture(scope="module")
def client(server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server}/v1", api_key=KEY)


def create(client: openai.OpenAI, lines: Sequence[dict[str, Any] | bytes], **more: Any) -> Any:
    """Create a job of these lines."""
    data = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    fields = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **more}
    return client.batches.create(input_file_id=file.id, **fields)


def until(client: openai.OpenAI, batch_id: str, is_reached: Callable[[Any], bool]) -> Any:
    """Wait until `is_reached` holds for the job and return the job."""
    deadline = time.monotonic() + WITHIN_S
    while not is_reached(job := client.batches.retrieve(batch_id)):
        assert time.monotonic() < deadline, job
        time.sleep(0.05)
    return job


def num_sequences(server: str) -> int:
    """Return the number of sequences that the engine has now."""
    info = requests.get(f"{server}/server_info", headers=HEADERS, timeout=10).json()
    return sum(info["internal_states"][0]["sgl_batch"]["sequences"].values())


def until_idle(server: str) -> None:
    """Wait until the engine has no sequence, for less time than the longest of them would take."""
    deadline = time.monotonic() + 5
    while (number := num_sequences(server)) > 0:
        assert time.monotonic() < deadline, number
        time.sleep(0.05)


def has_ended(job: Any) -> bool:
    return job.status in ("failed", "completed")


def content(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def curl(server: str, path: str, *argv: str, key: str = KEY) -> Any:
    """Return the JSON that curl gets."""
    command = ["curl", "-s", f"{server}{path}", "-H", f"Authorization: Bearer {key}", *argv]
    return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)


def test_the_openai_client_chats_and_streams(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    request: dict[str, Any] = {"model": MODEL, "messages": SAME["body"]["messages"], "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**request)
    stream = client.chat.completions.create(**request, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert whole.choices[0].message.content == streamed != ""


def test_curl_gets_a_completion_and_a_clear_refusal(server: str) -> None:
    def complete(body: dict[str, Any]) -> Any:
        return curl(server, "/v1/completions", "-H", "Content-Type: application/json", "-d", json.dumps(body))

    good = complete({"model": MODEL, "prompt": "Return the", "max_tokens": 5, "temperature": 0})
    assert good["choices"][0]["text"]
    bad = complete({"model": MODEL, "prompt": "Return the", "max_tokens": -5})
    assert "-5" in bad["error"]["message"]
    assert bad["error"]["type"] == "invalid_request_error"


def test_a_batch_line_gets_the_body_that_the_online_endpoint_returns(
    server: str, client: openai.OpenAI, repo_root: Path, tmp_path: Path
) -> None:
    online = requests.post(f"{server}/v1/chat/completions", json=SAME["body"], headers=HEADERS, timeout=60).json()
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(SAME) + "\n")
    done = subprocess.run(run_argv(repo_root, source, output), capture_output=True, text=True, timeout=300)
    files = collect(done.returncode, done.stderr, output)
    assert files.exit_code == 0, files.stderr
    job = until(client, create(client, [SAME]).id, lambda job: job.status == "completed")
    for line in (files.output[0], content(client, job.output_file_id)[0]):
        body = line["response"]["body"]
        assert body.keys() == online.keys()
        assert {k: v for k, v in body.items() if k not in VARYING} == {
            k: v for k, v in online.items() if k not in VARYING
        }


def test_a_job_of_the_openai_client_has_its_output_in_order_and_its_errors_in_a_file_of_their_own(
    client: openai.OpenAI,
) -> None:
    lines = [chat_line(f"line {n}", f"Say {n}.", max_tokens=4 + n % 7, temperature=0) for n in range(60)]
    lines[17]["body"]["temperature"] = -3
    job = create(client, lines, metadata={"for": "a test"})
    assert job.status in ("validating", "in_progress")
    job = until(client, job.id, lambda job: job.status == "completed")
    assert (job.request_counts.total, job.request_counts.completed, job.request_counts.failed) == (60, 59, 1)
    output = content(client, job.output_file_id)
    assert [line["custom_id"] for line in output] == [f"line {n}" for n in range(60) if n != 17]
    assert {line["response"]["status_code"] for line in output} == {200}
    assert all(line["id"].startswith("batch_req_") and line["error"] is None for line in output)
    [error] = content(client, job.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"], error["error"]) == ("line 17", 400, None)
    assert "temperature" in error["response"]["body"]["error"]["message"]
    assert job.usage.output_tokens == sum(line["response"]["body"]["usage"]["completion_tokens"] for line in output)
    assert job.metadata == {"for": "a test"}
    assert job.id in [one.id for one in client.batches.list(limit=1)]
    assert client.files.retrieve(job.output_file_id).purpose == "batch_output"
    assert client.files.delete(job.output_file_id).deleted


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_pause_ends_no_line_of_a_job_and_mode_abort_aborts_online_requests(
    mode: str, server: str, client: openai.OpenAI
) -> None:
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}

    def control(path: str, **body: Any) -> requests.Response:
        return requests.post(f"{server}{path}", json=body, headers=admin, timeout=60)

    # All lines are still in the engine when the online request has come, however late this process sees it.
    long = {"max_tokens": 1000, "ignore_eos": True, "temperature": 0.9, "seed": 3}
    job = create(client, [chat_line(f"line {n}", f"Say {n}.", **long) for n in range(4)])
    with concurrent.futures.ThreadPoolExecutor(1) as online:
        parameters = {"max_new_tokens": 3000, "ignore_eos": True}
        request = online.submit(control, "/generate", text="Say.", sampling_params=parameters)
        until_sequences(server, 5)
        assert control("/pause_generation", mode=mode).ok
        before = counters(server)
        update = {"model_path": str(MODEL_PATH), "flush_cache": mode != "in_place"}
        assert control("/update_weights_from_disk", **update).json()["success"]
        assert (control("/flush_cache").status_code == 200) == (mode != "in_place")
        assert counters(server) == before, "no step runs during the pause"
        assert client.batches.retrieve(job.id).request_counts.completed == 0
        if mode == "abort":
            assert request.result(10).json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert control("/continue_generation").ok
        job = until(client, job.id, lambda job: job.status == "completed")
        control("/abort_request", abort_all=True)
        assert request.result(10).json()["meta_info"]["finish_reason"]["type"] in ("abort", "length")
    lines = content(client, job.output_file_id)
    assert [line["custom_id"] for line in lines] == [f"line {n}" for n in range(4)]
    assert {line["response"]["body"]["usage"]["completion_tokens"] for line in lines} == {1000}
    assert {line["response"]["body"]["choices"][0]["finish_reason"] for line in lines} == {"length"}
    until_idle(server)


def until_sequences(server: str, number: int) -> None:
    """Wait until the engine has `number` sequences."""
    deadline = time.monotonic() + 10
    while num_sequences(server) < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def counters(server: str) -> dict[str, int]:
    """Return the engine's counters."""
    info = requests.get(f"{server}/server_info", headers=HEADERS, timeout=10).json()
    return info["internal_states"][0]["sgl_batch"]["counters"]


def test_a_cancelled_job_keeps_finished_lines_and_leaves_the_engine_idle(server: str, client: openai.OpenAI) -> None:
    long = {"max_tokens": 3000, "ignore_eos": True}
    lines = [chat_line("short", "Say.", max_tokens=2)] + [chat_line(f"long {n}", "Say.", **long) for n in range(8)]
    job = create(client, lines)
    until(client, job.id, lambda job: job.request_counts is not None and job.request_counts.completed == 1)
    assert num_sequences(server) == 8
    assert client.batches.cancel(job.id).status in ("cancelling", "cancelled")
    job = until(client, job.id, lambda job: job.status == "cancelled")
    assert [line["custom_id"] for line in content(client, job.output_file_id)] == ["short"]
    until_idle(server)


def test_a_client_that_disconnects_leaves_the_engine_idle(server: str, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="Say", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert num_sequences(server) == 1
    stream.close()
    body = {"model": MODEL, "prompt": "Say", "max_tokens": 3000, "ignore_eos": True}
    with pytest.raises(requests.ReadTimeout):
        requests.post(f"{server}/v1/completions", json=body, headers=HEADERS, timeout=0.5)
    until_idle(server)


def test_an_invalid_job_fails_as_a_whole_and_names_its_invalid_lines(server: str, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"custom_id": "a"}\n{\n')
    file = curl(server, "/v1/files", "-F", "purpose=batch", "-F", f"file=@{source}")
    body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    job = curl(server, "/v1/batches", "-d", json.dumps(body))
    deadline = time.monotonic() + WITHIN_S
    while (job := curl(server, f"/v1/batches/{job['id']}"))["status"] != "failed":
        assert time.monotonic() < deadline, job
        time.sleep(0.05)
    assert {error["line"] for error in job["errors"]["data"]} == {1, 2}
    assert "invalid_json_line" in {error["code"] for error in job["errors"]["data"]}


def test_keys_are_required_and_never_disclosed(server: str) -> None:
    assert requests.get(f"{server}/v1/models", timeout=10).status_code == 401
    assert requests.get(f"{server}/v1/files", timeout=10).json()["error"]["code"] == "invalid_api_key"
    for path in ("/server_info", "/get_server_info"):
        info = requests.get(server + path, headers=HEADERS, timeout=10)
        assert info.status_code == 200
        assert info.json()["api_key"] is None
        assert KEY not in info.text
        assert ADMIN_KEY not in info.text
    assert requests.post(f"{server}/flush_cache", headers=HEADERS, timeout=10).status_code == 401
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    assert requests.post(f"{server}/flush_cache", headers=admin, timeout=10).status_code == 200
    foreign = {**HEADERS, "Origin": "https://evil.example"}
    answer = requests.options(f"{server}/v1/models", headers=foreign, timeout=10)
    assert answer.status_code == 403
    assert not [name for name in answer.headers if name.lower().startswith("access-control-")]


def test_metrics_include_those_of_the_service_and_of_sglang(server: str) -> None:
    text = requests.get(f"{server}/metrics", headers=HEADERS, timeout=10).text
    assert "sgl_batch:engine_ready 1.0" in text
    assert "sgl_batch:lines_completed_total" in text
    assert "\nsglang:" in text


def test_the_status_page_shows_jobs_and_the_engines_time_by_part(server: str) -> None:
    assert "<title>sgl_batch</title>" in requests.get(server, timeout=10).text
    found = requests.get(f"{server}/v1/sgl_batch/progress", headers=HEADERS, timeout=10).json()
    assert found["health"]["status"] == "ok"
    assert found["health"]["engine"]["forward"] == "coroutine"
    assert found["jobs"]
    assert found["engine"]["part_s"]["experts"] > 0
    assert any(sample["tokens_per_expert_call"] for sample in found["engine"]["samples"])


def test_random_invalid_lines_get_their_errors_and_the_engine_goes_on(server: str, client: openai.OpenAI) -> None:
    dice = random.Random(5)
    job = until(client, create(client, [make_line(dice) for _ in range(300)]).id, has_ended)
    assert (job.status, len(job.errors.data)) == ("failed", 100)
    lines = [make_request(dice, f"line {n}") for n in range(300)]
    lines += [good_line(f"fatal {n}", **fields) for n, fields in enumerate(FATAL_BODIES)]
    job = until(client, create(client, lines, endpoint="/v1/completions").id, has_ended)
    assert (job.status, job.request_counts.total) == ("completed", len(lines))
    found = content(client, job.output_file_id) + content(client, job.error_file_id)
    statuses = {line["custom_id"]: line["response"]["status_code"] for line in found}
    assert len(statuses) == len(found) == len(lines)
    assert set(statuses.values()) == {200, 400}
    assert {statuses[f"fatal {n}"] for n in range(len(FATAL_BODIES))} == {400}
    for fields in FATAL_GENERATIONS:
        answer = requests.post(f"{server}/generate", json={"text": "Say", **fields}, headers=HEADERS, timeout=10)
        assert answer.status_code == 400, (fields, answer.text)
    assert requests.get(f"{server}/health", timeout=10).json()["engine"]["restarts"] == 0
    job = until(client, create(client, [chat_line("good", "Say.", max_tokens=2)]).id, has_ended)
    assert (job.status, job.request_counts.completed) == ("completed", 1)
