"""`sgl-batch plan`: with a profile, without one, and what is said of mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import made_profiles as made
import pytest

from sgl_batch.cli.plan.command import plan_command
from sgl_batch.cli.run.options import run_flags
from sgl_batch.planner.feeding import feeding_s
from sgl_batch.startup.kept_profile import keep_profile, machine_facts

TINY = Path(__file__).resolve().parents[3] / "test" / "models" / "tiny-qwen3-moe"


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def profile_file(tmp_path):
    path = tmp_path / "profile.json"
    here = machine_facts(TINY, dtype="bfloat16", weight_dtype="auto")
    keep_profile(path, replace(made.profile(), machine=here))
    return path


def to_message(capsys, *argv):
    code = plan_command(["--model", str(TINY), *map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


def error_of(capsys, *argv):
    assert plan_command([str(one) for one in argv]) == 1
    said = capsys.readouterr().err
    assert said.startswith("sgl-batch plan: error: ")
    assert "Traceback" not in said
    return said


def test_without_a_profile_the_engines_defaults_hold(capsys):
    code, message = to_message(capsys)
    assert (code, message["plan"]["flags"]) == (0, [])
    assert "--profile makes one" in message["profile"]["text"]
    assert message["memory"]["source"] == "counted"


def test_several_instances_take_the_time_of_one_share_and_of_feeding_all(capsys, profile_file):
    share = to_message(capsys, "--profile-file", profile_file, "--workload", "64:32x300")[1]["plan"]
    asked = ("--profile-file", profile_file, "--workload", "64:32x900", "--instances", "3", "--deadline", "1h")
    code, message = to_message(capsys, *asked)
    found = message["instances"]
    assert (code, found["count"], found["requests_each"]) == (0, 3, 300)
    assert found["share_s"] == message["plan"]["seconds"] == share["seconds"]
    assert found["feeding_s"] == pytest.approx(feeding_s(900, 3), abs=0.001)
    assert found["seconds"] == pytest.approx(share["seconds"] + feeding_s(900, 3), abs=0.002)
    assert message["deadline"]["whole_s"] == pytest.approx(found["seconds"], abs=0.002)
    assert "--instances 3" in message["run_flags"]
    assert "assumed" in found["source"]
    assert plan_command(["--model", str(TINY), *map(str, asked)]) == 0
    assert "3, each with 300 requests" in capsys.readouterr().out


@pytest.mark.parametrize("number", ["0", "two", "9999999"])
def test_a_wrong_number_of_instances_is_refused(capsys, number):
    assert f"--instances is {number!r}" in error_of(capsys, "--model", TINY, "--instances", number)


def test_several_instances_need_a_profile(capsys):
    assert "--instances needs a prediction" in error_of(capsys, "--model", TINY, "--instances", "2")


def test_with_a_profile_there_is_a_plan_with_its_time_and_a_runner_up(capsys, profile_file):
    code, message = to_message(capsys, "--profile-file", profile_file, "--workload", "64:32x64")
    assert code == 0
    plan = message["plan"]
    assert sum(plan["parts_s"].values()) == pytest.approx(plan["seconds"], rel=0.01)
    assert plan["bottleneck"] in plan["parts_s"]
    assert message["runner_up"]["why_it_lost"]
    assert plan["source"] == "fitted"
    assert set(message["memory"]) >= {"prefill", "decode", "kv_pages"}


def test_the_flags_of_a_plan_are_those_of_run(capsys, profile_file):
    _, message = to_message(capsys, "--profile-file", profile_file, "--workload", "64:32x16", "--kv-store-bytes", "1G")
    flags = [word for word in " ".join(message["run_flags"]).split() if word.startswith("--")]
    assert "--kv-store-bytes" in flags
    assert len(flags) == len(set(flags))
    from sgl_batch.config import field_names

    known = {*run_flags(), *(f"--{name.replace('_', '-')}" for name in field_names())}
    assert {flag.replace("--no-", "--") for flag in flags} <= known


def test_the_text_says_where_numbers_are_from(capsys, profile_file):
    assert plan_command(["--model", str(TINY), "--profile-file", str(profile_file), "--workload", "64:32x16"]) == 0
    said = capsys.readouterr().out
    assert all(source in said for source in ("measured here", "fitted", "counted"))
    assert "sgl-batch run -i INPUT -o OUTPUT --model" in said


def test_a_profile_serves_deadlines_and_pictures(capsys, tmp_path, profile_file):
    asked = ("--profile-file", profile_file, "--workload", "64:32x16", "--deadline", "10h")
    code, message = to_message(capsys, *asked, "--picture", tmp_path / "plan.svg")
    assert (code, message["deadline"]["fits"], message["deadline"]["source"]) == (0, True, "fitted")
    assert "(fitted)" in (tmp_path / "plan.svg").read_text()
    assert sum(message["plan"]["bound_shares"].values()) == pytest.approx(1, abs=0.001)


def test_too_little_memory_is_no_plan(capsys, profile_file):
    code, message = to_message(capsys, "--profile-file", profile_file, "--device-memory", "100M")
    assert (code, message["plan"]) == (1, None)
    assert "--device-memory" in message["why"]


def test_a_foreign_profile_is_refused(capsys, tmp_path):
    path = tmp_path / "profile.json"
    keep_profile(path, made.profile())
    assert "of another processor (made up" in error_of(capsys, "--model", TINY, "--profile-file", path)


def test_a_foreign_profile_in_the_cache_leaves_the_defaults(capsys, tmp_path):
    from sgl_batch.startup.kept_profile import profile_path

    keep_profile(profile_path(TINY, dtype="bfloat16", weight_dtype="auto"), made.profile())
    code, message = to_message(capsys)
    assert code == 0
    assert "of another processor" in message["profile"]["text"]


def test_mistakes_are_told_in_a_line(capsys, tmp_path, profile_file):
    assert "there is no model directory" in error_of(capsys, "--model", tmp_path / "nowhere")
    assert "config.json" in error_of(capsys, "--model", tmp_path)
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("128 32\n64\n")
    assert "line 2" in error_of(capsys, "--model", TINY, "--lengths", lengths)
    assert "cannot be read" in error_of(capsys, "--model", TINY, "--lengths", tmp_path / "none")
    assert "as in 128:32x256" in error_of(capsys, "--model", TINY, "--workload", "many")
    assert "there is no profile" in error_of(capsys, "--model", TINY, "--profile-file", tmp_path / "none")
    streamed = ("--profile-file", profile_file, "--weights", "streamed")
    assert "--profile --weights streamed" in error_of(capsys, "--model", TINY, *streamed)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--workload", "4000:97x2"], "the longest request of the batch: 4,097 tokens"),
        (["--kv-store-bytes", "1000"], "raise --kv-store-bytes"),
        (["--kv-store-bytes", "1000T"], "lower --kv-store-bytes"),
        (["--weight-memory", "1M"], "give --weights streamed too"),
    ],
)
def test_what_no_engine_takes_gets_no_plan(capsys, argv, words):
    assert words in error_of(capsys, "--model", TINY, *argv)


def test_a_config_without_a_field_is_named(capsys, tmp_path):
    fields = json.loads((TINY / "config.json").read_text())
    del fields["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert "hidden_size" in error_of(capsys, "--model", tmp_path)
