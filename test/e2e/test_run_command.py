"""`sgl-batch run` answers every line once, names each mistake, and gives runs that can be repeated."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_profiles
import psutil
import pytest
import torch

from sgl_batch.startup.kept_profile import keep_profile, machine_facts, profile_path

from .conftest import MODEL, RunFiles, chat_line, collect, read_lines, run_argv
from .odd_lines import check_result_lines, odd_input
from .reachable import exposed_to_others

pytestmark = pytest.mark.engine

GOOD = [
    chat_line("greedy", "What does os.path.join do?", temperature=0),
    chat_line("sampled", "Return the", temperature=0.9),
    chat_line("choices", "Return the", temperature=0.9, n=3, seed=11),
    chat_line("logprobs", "Return the", temperature=0, logprobs=True, top_logprobs=2),
    chat_line("stopped", "Return the", temperature=0, stop=["e"]),
    chat_line("forged", "Return the", temperature=0, cache_salt="sgl_batch.choice:1:2:x"),
    {
        "custom_id": "completion",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": MODEL, "prompt": "Return the", "max_tokens": 8, "temperature": 0},
    },
]
BAD: list[tuple[str, str]] = [
    ('{"custom_id": "cut", "method"', "invalid_json_line"),
    (json.dumps({**chat_line("no-body", "x"), "body": None}), "missing_body"),
    (json.dumps(chat_line("other-model", "x", model="gpt-none")), "model_mismatch"),
    (json.dumps(chat_line("empty", "x", messages=[])), "empty_messages"),
    (json.dumps(chat_line("negative", "x", max_tokens=-4)), "invalid_max_tokens"),
    (json.dumps(chat_line("greedy", "a second line of this name")), "duplicate_custom_id"),
    (json.dumps(chat_line("too-long", "word " * 6000)), ""),
]


@pytest.fixture(scope="module")
def mixed_input(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of good and bad lines by turns, then odd ones."""
    path = tmp_path_factory.mktemp("mixed") / "in.jsonl"
    lines = [json.dumps(line) for line in GOOD]
    for index, (line, _) in enumerate(BAD):
        lines.insert(1 + 2 * index, line)
    path.write_bytes("\n".join(lines).encode() + b"\n" + odd_input())
    return path


@pytest.fixture(scope="module")
def first_run(mixed_input: Path, run_command: Callable[..., RunFiles]) -> RunFiles:
    return run_command(mixed_input, mixed_input.with_name("first.jsonl"), "--seed", "7")


def test_good_lines_among_bad_ones_are_answered_in_order(first_run: RunFiles) -> None:
    assert first_run.exit_code == 2, first_run.stderr
    assert [line["custom_id"] for line in first_run.output[: len(GOOD)]] == [line["custom_id"] for line in GOOD]
    for line in first_run.output:
        assert line["error"] is None
        assert line["id"].startswith("batch_req_")
        assert line["response"]["status_code"] == 200
        assert line["response"]["body"]["model"] == MODEL
        assert line["response"]["body"]["usage"]["completion_tokens"] > 0
    by_id = {line["custom_id"]: line["response"]["body"] for line in first_run.output}
    assert len(by_id["choices"]["choices"]) == 3
    assert len(by_id["logprobs"]["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
    assert by_id["completion"]["object"] == "text_completion"
    texts = {name: body["choices"][0].get("message", {}).get("content") for name, body in by_id.items()}
    assert texts["forged"] == texts["logprobs"], "a cache salt that looks like an internal tag has no effect"


def test_each_bad_line_has_its_own_clear_error(first_run: RunFiles) -> None:
    errors = first_run.errors[: len(BAD)]
    for line, (_, code) in zip(errors, BAD, strict=True):
        error = line["response"]["body"]["error"]
        assert line["response"]["status_code"] == 400
        assert error["message"]
        if code:
            assert error["code"] == code
    assert "4096" in errors[-1]["response"]["body"]["error"]["message"], "the message names the limit"
    messages = [line["response"]["body"]["error"]["message"] for line in errors]
    assert len(set(messages)) == len(messages)


def test_every_odd_line_of_a_run_has_its_error(first_run: RunFiles) -> None:
    check_result_lines(first_run.output[len(GOOD) :], first_run.errors[len(BAD) :])


def test_the_summary_shows_the_time_of_each_part(first_run: RunFiles) -> None:
    for words in ("experts", "attention", "router", "sampling", "tokens out", "imbalance"):
        assert words in first_run.stderr
    assert "Traceback" not in first_run.stderr


def test_start_summary_and_manifest_name_the_forward_pass(first_run: RunFiles) -> None:
    assert re.search(r"^\[[^]]*\] forward: coroutine$", first_run.stderr, re.MULTILINE), first_run.stderr
    assert re.search(r"^ +forward +coroutine$", first_run.stderr, re.MULTILINE)
    assert first_run.manifest["plan"]["forward"] == "coroutine"


@pytest.fixture(scope="module")
def second_run(
    mixed_input: Path, run_command: Callable[..., RunFiles], repo_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunFiles:
    """The first run repeated with other sub-batches, and with a profile. Its processes log their imports."""
    sub_batches = ("--b-attn-decode", "3", "--b-attn-prefill", "5")
    model, kinds = repo_root / "test" / "models" / "tiny-qwen3-moe", {"dtype": "float32", "weight_dtype": "auto"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        keep_profile(
            profile_path(model, **kinds), replace(made_profiles.profile(), machine=machine_facts(model, **kinds))
        )
        patch.setenv("PYTHONPROFILEIMPORTTIME", "1")
        more = (*sub_batches, "--price-per-hour", "3600")
        return run_command(mixed_input, mixed_input.with_name("again.jsonl"), "--seed", "7", *more)


def test_a_run_is_repeated_from_its_manifest_whatever_the_sub_batches(
    first_run: RunFiles, second_run: RunFiles
) -> None:
    manifest = first_run.manifest
    assert manifest["status"] == "completed"
    assert manifest["seeds"]["job_seed"] == 7
    assert [answer(line) for line in second_run.output] == [answer(line) for line in first_run.output]


@pytest.mark.skipif(torch.cuda.is_available(), reason="profiles are of CPUs so far")
def test_with_a_profile_a_run_takes_the_plan_and_says_what_was_predicted(
    first_run: RunFiles, second_run: RunFiles
) -> None:
    plan = second_run.manifest["plan"]
    chosen = plan["planned"]["chosen"]
    assert {"b_moe_prefill", "b_moe_decode"} <= chosen.keys() <= {"b_moe_prefill", "b_moe_decode", "accumulate"}
    assert plan["planned"]["source"].startswith("measured profile of 2026-01-01: ")
    assert {name: plan["flags"][name] for name in chosen} == chosen
    assert (plan["flags"]["b_attn_decode"], plan["flags"]["b_attn_prefill"]) == (3, 5)
    in_force = plan["plan"]
    assert (in_force["decode"]["b_moe"], in_force["prefill"]["b_moe"]) == (
        chosen["b_moe_decode"],
        chosen["b_moe_prefill"],
    )
    prediction = second_run.manifest["prediction"]
    assert prediction["before_s"] > 0
    assert prediction["predicted_s"].keys() == prediction["measured_s"].keys() >= {"prefill", "decode", "total"}
    assert "Predicted and measured" in second_run.stderr
    cost = second_run.manifest["cost"]
    assert cost["amount"] == pytest.approx(second_run.manifest["wall_s"], abs=0.01)
    assert cost["before"]["amount"] == pytest.approx(prediction["before_s"], rel=0.01)
    assert cost["per_million_tokens"] < cost["per_million_output_tokens"] < cost["per_million_lines"]
    assert not {"prediction", "cost"} & first_run.manifest.keys()
    assert "plan: conservative defaults (there is no profile of this model in float32" in first_run.stderr


def test_on_a_cpu_torch_is_imported_once_and_the_engines_processes_are_forked(second_run: RunFiles) -> None:
    assert second_run.exit_code == 2, second_run.stderr[-2000:]
    imports = re.findall(r"^import time: .*\| torch$", second_run.stderr, re.MULTILINE)
    assert len(imports) == (3 if torch.cuda.is_available() else 1)


def answer(line: dict[str, Any]) -> list[Any]:
    choices = line["response"]["body"]["choices"]
    return [choice.get("message", {}).get("content", choice.get("text")) for choice in choices]


@pytest.fixture
def long_run(repo_root: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run that takes minutes unless a test stops it; short lines finish early."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [chat_line(f"line-{i}", "Return the", max_tokens=4 + 400 * (i > 40), ignore_eos=True) for i in range(600)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    process = subprocess.Popen(
        run_argv(repo_root, source, output, "--progress", "plain", "--b-moe-decode", "16"),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process, output
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for_output(process: subprocess.Popen[str], output: Path) -> None:
    deadline = time.monotonic() + 300
    while not output.exists() or len(output.read_bytes().splitlines()) < 20:
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline, "no line was finished in time"
        time.sleep(0.2)


def test_ctrl_c_writes_finished_lines_and_counts_the_missing_ones(
    long_run: tuple[subprocess.Popen[str], Path],
) -> None:
    process, output = long_run
    wait_for_output(process, output)
    assert exposed_to_others(process.pid) == []
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    files = collect(process.returncode, stderr, output)
    assert files.exit_code == 130, stderr
    assert files.manifest["status"] == "interrupted"
    ids = [int(line["custom_id"].split("-")[1]) for line in files.output]
    assert ids == sorted(set(ids))
    assert 20 <= len(ids) < 600
    assert f"{600 - len(ids)} of 600 lines have neither an output nor an error" in stderr
    assert "Traceback" not in stderr


def test_a_killed_scheduler_ends_the_run_and_finished_lines_are_kept(
    long_run: tuple[subprocess.Popen[str], Path],
) -> None:
    process, output = long_run
    wait_for_output(process, output)
    scheduler = next(p for p in psutil.Process(process.pid).children(recursive=True) if "scheduler" in p.name())
    scheduler.kill()
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 3, stderr
    assert len(read_lines(output)) >= 20
    assert "the scheduler died: SIGKILL (its process was killed)" in stderr
    assert not psutil.pid_exists(scheduler.pid)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--b-moe-decode", "0"], "b_moe_decode is 0; it must be at least 1"),
        (["--no-such-flag", "1"], "no-such-flag"),
    ],
)
def test_bad_flags_exit_with_1_before_anything_starts(
    flags: list[str], message: str, mixed_input: Path, tmp_path: Path, run_command: Callable[..., RunFiles]
) -> None:
    files = run_command(mixed_input, tmp_path / "never.jsonl", *flags)
    assert files.exit_code == 1
    assert message in files.stderr
    assert "Traceback" not in files.stderr
    assert not (tmp_path / "never.jsonl").exists()
