"""`python -m sgl_batch.launch_server`: SGLang's endpoints, with the real `openai` client and the real curl."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from .conftest import MODEL, Server, chat_line, collect, run_argv

pytestmark = pytest.mark.engine

SAME = chat_line("same", "What does os.path.join do?", temperature=0.8, seed=3, n=2, logprobs=True)


@pytest.fixture(scope="module")
def server(start_server: Callable[[], Server]) -> str:
    return start_server().url


def test_the_openai_client_chats_and_streams(server: str) -> None:
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == [MODEL]
    request: dict[str, Any] = {"model": MODEL, "messages": SAME["body"]["messages"], "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**request)
    stream = client.chat.completions.create(**request, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert whole.choices[0].message.content == streamed != ""


def test_curl_gets_a_completion_and_a_clear_refusal(server: str) -> None:
    def curl(body: dict[str, Any]) -> dict[str, Any]:
        argv = ["curl", "-s", f"{server}/v1/completions", "-H", "Content-Type: application/json"]
        done = subprocess.run([*argv, "-d", json.dumps(body)], capture_output=True, text=True, timeout=60, check=True)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    good = curl({"model": MODEL, "prompt": "Return the", "max_tokens": 5, "temperature": 0})
    assert good["choices"][0]["text"]
    bad = curl({"model": MODEL, "prompt": "Return the", "max_tokens": -5})
    assert "-5" in json.dumps(bad)


def test_a_batch_line_gets_the_body_that_the_online_endpoint_returns(
    server: str, repo_root: Path, tmp_path: Path
) -> None:
    online = requests.post(f"{server}/v1/chat/completions", json=SAME["body"], timeout=60).json()
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(SAME) + "\n")
    done = subprocess.run(run_argv(repo_root, source, output), capture_output=True, text=True, timeout=300)
    files = collect(done.returncode, done.stderr, output)
    assert files.exit_code == 0, files.stderr
    line = files.output[0]["response"]["body"]
    assert line.keys() == online.keys()
    varying = {"id", "created"}
    assert {k: v for k, v in line.items() if k not in varying} == {k: v for k, v in online.items() if k not in varying}


def test_help_groups_our_flags_before_sglangs() -> None:
    argv = [sys.executable, "-m", "sgl_batch.launch_server", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 0
    assert done.stdout.index("--b-attn-prefill") < done.stdout.index("--tensor-parallel-size")
    assert "sgl_batch: coroutine forward" in done.stdout
