"""`sgl-batch simulate --hardware here`: this machine by its kept profile, with the planner's plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import made_profiles as made
import pytest

from sgl_batch.cli.plan.command import plan_command
from sgl_batch.cli.simulate.command import simulate_command
from sgl_batch.startup.kept_profile import keep_profile, machine_facts, profile_path

TINY = Path(__file__).resolve().parents[3] / "test" / "models" / "tiny-qwen3-moe"
KINDS = {"dtype": "bfloat16", "weight_dtype": "auto"}
BATCH = ("--workload", "64:32", "--num", "48")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def kept():
    keep_profile(profile_path(TINY, **KINDS), replace(made.profile(), machine=machine_facts(TINY, **KINDS)))


def argv_of(*argv):
    return ["--model", str(TINY), "--hardware", "here", *map(str, argv)]


def to_message(capsys, *argv):
    code = simulate_command([*argv_of(*argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


def error_of(capsys, *argv):
    assert simulate_command(argv_of(*argv)) == 1
    said = capsys.readouterr().err
    assert said.startswith("sgl-batch simulate: error: ")
    assert said.count("\n") == 1
    return said


def test_without_a_profile_a_line_names_the_command_that_makes_one(capsys):
    assert f"sgl-batch plan --model {TINY} --profile makes one" in error_of(capsys)


def test_a_profile_of_another_machine_is_refused(capsys):
    keep_profile(profile_path(TINY, **KINDS), made.profile())
    assert "of another processor" in error_of(capsys)


@pytest.mark.usefixtures("kept")
def test_a_batch_takes_about_as_long_as_the_plan_predicts(capsys):
    assert plan_command(["--model", str(TINY), "--workload", "64:32x48", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    code, message = to_message(capsys, *BATCH)
    assert code == 0
    (run,) = message["policies"]
    assert run["seconds"] == pytest.approx(plan["seconds"], rel=0.1)
    assert all(flag in run["setup"] for flag in plan["flags"])
    assert run["counts"]["finished"] == 48
    assert set(run["sources"].values()) == {"the profile of this machine"}
    assert set(run["parts_s"]) <= set(run["sources"])
    assert run["interval"]["low_s"] <= run["seconds"] <= run["interval"]["high_s"]
    assert message["hardware"]["profile"]["made"] == made.profile().made


@pytest.mark.usefixtures("kept")
def test_each_form_of_kv_is_simulated_with_a_store(capsys):
    code, message = to_message(capsys, *BATCH, "--kv-store-bytes", "1G")
    (run,) = message["policies"]
    assert (code, run["compared"]) == (0, 3)
    seconds = [form["seconds"] for form in run["forms"]]
    assert seconds == sorted(seconds)
    assert simulate_command(argv_of(*BATCH, "--kv-store-bytes", "1G")) == 0
    assert "KV streamed from the store" in capsys.readouterr().out


@pytest.mark.usefixtures("kept")
def test_several_ranks_share_the_machine_and_its_memory(capsys):
    lengths = ("--lengths", "cv=0.5", "--no-intervals")
    one, two = (to_message(capsys, *BATCH, *lengths, "--ranks", ranks)[1] for ranks in (1, 2))
    assert two["hardware"]["memory_bytes"] == one["hardware"]["memory_bytes"] // 2
    run = two["policies"][0]
    assert run["counts"]["finished"] == 48
    assert run["idle"] > 0 == one["policies"][0]["idle"]
    assert "default limits" in " ".join(run["notes"])
    assert "interval" not in run


@pytest.mark.usefixtures("kept")
def test_other_policies_say_that_their_kernels_were_not_measured(capsys):
    code, message = to_message(capsys, *BATCH, "--policies", "batchgen,sglang")
    assert code == 0
    assert "seconds" in message["policies"][0]
    assert "not measured on this machine" in message["policies"][1]["why"]
    assert simulate_command(argv_of(*BATCH, "--policies", "batchgen:2")) == 1
    assert "--ranks" in capsys.readouterr().out


@pytest.mark.usefixtures("kept")
def test_a_run_is_stopped_and_drawn(capsys, tmp_path):
    batch = (*BATCH, "--lengths", "cv=0.5")
    _, whole = to_message(capsys, *batch)
    until_s = 0.9 * whole["policies"][0]["seconds"]
    _, message = to_message(capsys, *batch, "--until", f"{until_s}s", "--plot", tmp_path / "run.svg")
    run = message["policies"][0]
    assert 0 < run["counts"]["finished"] < 48
    assert "interval" not in run
    assert "on this machine, 48 requests" in (tmp_path / "run.svg").read_text()


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--ranks", "0"), "--ranks is 0"),
        (("--ranks", "3"), "its 16 experts can be divided"),
        (("--host-memory", "1T"), "--device-memory"),
        (("--collapse",), "--collapse is for clusters"),
        (("--calibrate", "cells.csv"), "--calibrate is for clusters"),
        (("--kv-store-bytes", "much"), "kv_store_bytes is 'much'"),
        (("--workload", "64"), "PROMPT:OUTPUT"),
        (("--workload", "8000:100"), "the longest request of the batch: 8,100 tokens"),
        (("--kv-store-bytes", "1000"), "raise --kv-store-bytes"),
    ],
)
def test_mistakes_are_one_line(capsys, argv, said):
    assert said in error_of(capsys, *argv)


@pytest.mark.usefixtures("kept")
def test_what_does_not_fit_says_so(capsys):
    assert simulate_command(argv_of(*BATCH, "--device-memory", "100M")) == 1
    assert "does not run: no plan fits" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("flag", ["--ranks", "--kv-store-bytes", "--device-memory"])
def test_flags_of_this_machine_are_refused_for_clusters(capsys, flag):
    assert simulate_command(["--model", "deepseek-r1", "--hardware", "h20x16", flag, "2"]) == 1
    assert f"{flag} is for --hardware here" in capsys.readouterr().err
