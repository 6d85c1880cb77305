"""The manifest: what it holds, and what it must not show."""

from __future__ import annotations

import json
import platform

import pytest

from sgl_batch.core.answers import EngineStats
from sgl_batch.file_run.manifest import Manifest, RunFacts, redacted
from sgl_batch.file_run.model_hash import model_hash
from sgl_batch.file_run.run_result import RunResult, RunStatus
from sgl_batch.jobs.line_reader import InputScan


@pytest.fixture
def manifest(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    facts = RunFacts(
        run_id="r1",
        argv=["sgl-batch", "run", "--api-key", "hush"],
        options={"limit": None},
        input_path="in.jsonl",
        scan=InputScan(num_lines=3, num_bytes=99, sha256="ab"),
        model_path=str(model),
        served_model_names=("tiny",),
        job_seed=5,
        plan={"b_attn_decode": 64},
    )
    return Manifest(tmp_path / "out.manifest.json", facts)


def read(manifest):
    return json.loads(manifest.path.read_text())


def test_at_the_start_it_says_all_that_a_repetition_needs(manifest, tmp_path):
    manifest.write()
    content = read(manifest)
    assert content["status"] == "running"
    assert content["input"] == {"path": "in.jsonl", "num_lines": 3, "num_bytes": 99, "sha256": "ab"}
    assert content["model"]["hash"] == model_hash(tmp_path / "model")
    assert content["seeds"]["job_seed"] == 5
    assert content["plan"] == {"b_attn_decode": 64}
    assert content["versions"]["python"] == platform.python_version()
    assert {"sgl-batch", "sglang", "torch", "transformers"} <= content["versions"].keys()
    assert "hush" not in manifest.path.read_text()


def test_at_the_end_it_gains_the_result(manifest):
    manifest.write()
    stats = EngineStats(
        counters={"expert_calls": 2.0},
        part_s={"experts": 1.0},
        tokens_per_expert=[1, 2],
        peak_memory_bytes=7,
        memory_budget_bytes=9,
    )
    manifest.finish(
        RunResult(
            status=RunStatus.INTERRUPTED,
            message="stopped by a signal",
            total=3,
            ok=1,
            failed=1,
            wall_s=2.5,
            tokens_in=7,
            tokens_out=5,
            stats=stats,
        )
    )
    content = read(manifest)
    assert content["status"] == "interrupted"
    assert content["exit_code"] == 130
    assert content["counts"] | {"failed_by_code": {}} == {
        "total": 3,
        "ok": 1,
        "failed": 1,
        "missing": 1,
        "failed_by_code": {},
    }
    assert content["usage"] == {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    assert content["engine"]["tokens_per_expert"] == [1, 2]
    assert content["engine"]["memory"] == {"peak_bytes": 7, "budget_bytes": 9}
    assert [path.name for path in manifest.path.parent.glob("*draft*")] == []


def test_it_says_where_sequences_waited_that_outgrew_the_device(manifest):
    manifest.write()
    stats = EngineStats(counters={"sequences_overflowed": 3, "overflow_bytes": 64 << 20}, overflow_directory="/scratch")
    numbers = {"message": None, "total": 2, "ok": 2, "failed": 0, "wall_s": 1.0, "tokens_in": 2, "tokens_out": 7}
    manifest.finish(RunResult(status=RunStatus.COMPLETED, stats=stats, **numbers))
    assert read(manifest)["engine"]["overflow"] == {"directory": "/scratch", "bytes": 64 << 20, "times": 3}


def test_a_run_that_broke_off_is_marked_failed(manifest):
    manifest.abort("RuntimeError: boom")
    assert (read(manifest)["status"], read(manifest)["message"]) == ("failed", "RuntimeError: boom")


def test_secret_values_are_left_out_of_the_arguments():
    assert redacted(["--api-key", "a", "--admin-api-key=b", "--dtype", "auto"]) == [
        "--api-key",
        "(secret)",
        "--admin-api-key=(secret)",
        "--dtype",
        "auto",
    ]


def test_what_each_rank_counted_is_kept(manifest):
    manifest.write()
    ranks = [EngineStats(counters={"output_tokens": number}) for number in (3, 4)]
    result = {"message": None, "total": 2, "ok": 2, "failed": 0, "wall_s": 1.0, "tokens_in": 2, "tokens_out": 7}
    stats = EngineStats(counters={"output_tokens": 7}, ranks=ranks)
    manifest.finish(RunResult(status=RunStatus.COMPLETED, stats=stats, **result))
    engine = read(manifest)["engine"]
    assert engine["counters"] == {"output_tokens": 7}
    assert [rank["counters"] for rank in engine["ranks"]] == [{"output_tokens": 3}, {"output_tokens": 4}]
