"""Lines and requests that cannot be answered as they ask get an error of their own, online and in a job.

test_run_command.py has those of a run.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
import requests

from .conftest import MODEL, Server, chat_line
from .odd_lines import DEAD_END, ODD_CHATS, check_result_lines, odd_input

pytestmark = pytest.mark.engine

WITHIN_S = 60
ODD_GENERATIONS: list[tuple[dict[str, Any], str]] = [
    ({"input_embeds": [[0.5, 0.5]]}, "input_embeds"),
    ({"image_data": "x.png"}, "image_data"),
    ({"http_worker_ipc": "ipc:///tmp/nowhere"}, "http_worker_ipc"),
    ({"data_parallel_rank": 99}, "data_parallel_rank"),
    ({"temperature": 0}, "temperature"),
    ({"sampling_params": {"regex": "("}}, "regex"),
    ({"sampling_params": {"ebnf": DEAD_END}}, "ebnf"),
    ({"sampling_params": {"sampling_seed": 1 << 64}}, "sampling_seed"),
]


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> str:
    return start_server("--max-line-bytes", "200K").url


def ended_job(client: openai.OpenAI, file_id: str) -> Any:
    job = client.batches.create(input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h")
    deadline = time.monotonic() + WITHIN_S
    while (job := client.batches.retrieve(job.id)).status not in ("failed", "completed"):
        assert time.monotonic() < deadline, job
        time.sleep(0.05)
    return job


def test_a_job_of_odd_lines_ends_with_an_error_for_each(server: str) -> None:
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none")
    file = client.files.create(file=("in.jsonl", odd_input()), purpose="batch")
    job = ended_job(client, file.id)
    assert job.status == "completed", job.errors
    result_lines = [
        [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
        for file_id in (job.output_file_id, job.error_file_id)
        if file_id is not None
    ]
    check_result_lines(*result_lines)
    # The error of too long a line names the flag that this server has.
    file = client.files.create(file=("in.jsonl", b'{"x": "' + b"x" * (201 << 10)), purpose="batch")
    job = ended_job(client, file.id)
    assert "204,800; shorten it or raise --max-line-bytes" in job.errors.data[0].message


@pytest.mark.parametrize("stream", [False, True])
def test_an_odd_request_is_refused_online(server: str, stream: bool) -> None:
    for fields, code, param in ODD_CHATS:
        body = {**chat_line("x", "Say.", **fields)["body"], "stream": stream}
        answer = requests.post(f"{server}/v1/chat/completions", json=body, timeout=WITHIN_S)
        if fields.get("ebnf") == DEAD_END and stream:
            assert '"code":400' in answer.text.replace(" ", ""), answer.text  # its first token has been sent
            continue
        assert answer.status_code == 400, (fields, answer.text)
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == (code, param), (fields, error)
    for url, body in (("/v1/completions", {"suffix": "x"}), ("/v1/completions", {"json_schema": '{"$ref": "#"}'})):
        body = {"model": MODEL, "prompt": "Say", "stream": stream, **body}
        error = requests.post(server + url, json=body, timeout=WITHIN_S).json()["error"]
        assert error["param"] in ("suffix", "json_schema"), error


def test_an_odd_generation_is_refused(server: str) -> None:
    for fields, param in ODD_GENERATIONS:
        body = {**({} if param == "input_embeds" else {"text": "Say"}), **fields}
        answer = requests.post(f"{server}/generate", json=body, timeout=WITHIN_S)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (fields, answer.text)
        streamed = requests.post(f"{server}/generate", json={**body, "stream": True}, timeout=WITHIN_S).text
        assert '"error"' in streamed or '"status_code":400' in streamed, (fields, streamed)


def test_requests_for_embedding_models_are_refused_and_scores_are_computed(server: str) -> None:
    for url, body in (
        ("/v1/embeddings", {"model": MODEL, "input": "Say"}),
        ("/v1/classify", {"model": MODEL, "input": "Say"}),
        ("/v1/rerank", {"query": "Say", "documents": ["a", "b"]}),
        ("/encode", {"text": "Say"}),
        ("/classify", {"text": "Say"}),
    ):
        answer = requests.post(server + url, json=body, timeout=WITHIN_S)
        assert answer.status_code == 400, (url, answer.text)
        assert answer.json()["error"]["message"], url
    score = {"model": MODEL, "query": [5, 6, 7], "items": [[8]], "label_token_ids": [11, 12]}
    [scores] = requests.post(f"{server}/v1/score", json=score, timeout=WITHIN_S).json()["scores"]
    request = {"input_ids": [5, 6, 7, 8], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    request["token_ids_logprob"] = [11, 12]
    meta = requests.post(f"{server}/generate", json=request, timeout=WITHIN_S).json()["meta_info"]
    [logprobs] = meta["output_token_ids_logprobs"]
    assert scores == pytest.approx([math.exp(logprob) for logprob, _, _ in logprobs], rel=1e-5)
