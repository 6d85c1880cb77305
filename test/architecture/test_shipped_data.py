"""Owns the rules for the sample requests in test/data and for the script that made them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def _convert(repo_root: Path, source: Path, target: Path, *options: str) -> subprocess.CompletedProcess[str]:
    script = repo_root / "scripts" / "gsm8k_to_batch.py"
    command = [sys.executable, str(script), str(source), str(target), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_sample_holds_24_distinct_chat_requests_beside_their_licence(data_dir: Path) -> None:
    lines = [json.loads(line) for line in (data_dir / "gsm8k_sample.jsonl").read_text("utf-8").splitlines()]
    assert [line["custom_id"] for line in lines] == [f"gsm8k-{number:04d}" for number in range(1, 25)]
    assert {(line["method"], line["url"], line["body"]["model"]) for line in lines} == {
        ("POST", "/v1/chat/completions", "default")
    }
    assert len({line["body"]["messages"][0]["content"] for line in lines}) == 24
    assert "MIT License" in (data_dir / "gsm8k_LICENSE").read_text("utf-8")


def test_converter_writes_one_request_for_each_question_up_to_the_limit(repo_root: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"question": f"{n}+é?", "answer": str(n)}) + "\n" for n in range(3)))
    result = _convert(repo_root, source, target, "--limit", "2", "--max-tokens", "7", "--model", "m")
    assert result.returncode == 0, result.stderr
    bodies = [json.loads(line)["body"] for line in target.read_text("utf-8").splitlines()]
    assert [body["messages"][0]["content"] for body in bodies] == ["0+é?", "1+é?"]
    assert {(body["model"], body["max_tokens"], body["temperature"]) for body in bodies} == {("m", 7, 0)}


def test_converter_names_the_line_that_has_no_question(repo_root: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"question": "a", "answer": "b"}\n{"answer": "b"}\n')
    result = _convert(repo_root, source, tmp_path / "out.jsonl")
    assert result.returncode == 1
    assert "in.jsonl:2" in result.stderr
