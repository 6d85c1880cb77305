"""`sgl-batch simulate`: what it prints, what programs get, pictures, calibration, and what is said of mistakes."""

from __future__ import annotations

import json

import pytest

from sgl_batch.cli.main import main
from sgl_batch.cli.simulate.command import simulate_command
from sgl_batch.cli.simulate.options import simulate_parser
from sgl_batch.cli.simulate.text import text

FAST = ("--model", "qwen3-30b-a3b", "--hardware", "h100x1", "--workload", "600:60x48")
ONE = (*FAST, "--policies", "sglang", "--no-intervals")


def to_message(capsys, *argv):
    code = simulate_command([*map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


def error_of(capsys, *argv):
    assert simulate_command([*map(str, argv)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("sgl-batch simulate: error: ")
    assert said.count("\n") == 1
    return said


def test_policies_stand_in_a_table_with_ratios_and_intervals(capsys):
    assert main(["simulate", *FAST, "--policies", "batchgen,sglang"]) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    header = next(line for line in lines if line.startswith("policy"))
    assert header.split("  ")[0] == "policy"
    assert all(word in header for word in ("time", "interval", "of the first", "tokens/s", "idle"))
    assert sum(line.startswith(("BatchGen", "SGLang")) for line in lines) == 4
    for row in ("sources", "by part", "bounds", "busy", "used", "sequences", "counts", "assumed"):
        assert any(line.startswith(row) for line in lines), row
    assert max(map(len, lines)) <= 120


def test_a_message_has_all_numbers_and_their_sources(capsys):
    code, message = to_message(capsys, *FAST, "--policies", "sglang,vllm")
    assert code == 0
    assert message["format"] == "sgl_batch.simulate/1"
    assert message["workload"]["output_tokens"] == 48 * 60
    first, second = message["policies"]
    assert first["counts"]["finished"] == second["counts"]["finished"] == 48
    assert sum(first["parts_s"].values()) == pytest.approx(first["seconds"], abs=0.01)
    assert set(first["parts_s"]) <= set(first["sources"]) | {"arrivals"}
    assert first["interval"]["low_s"] <= first["seconds"] <= first["interval"]["high_s"]
    low, high = second["ratio_interval"]
    assert low <= second["ratio"] <= high
    assert "ratio" not in first


def test_a_partition_of_the_last_sequences_is_told(capsys):
    _, message = to_message(capsys, *FAST, "--policies", "batchgen", "--no-intervals")
    assert message["policies"][0]["partitioned"] is None
    message["policies"][0]["partitioned"] = {"at_s": 90.0, "sequences": 1234, "ranks": 8}
    (row,) = [line for line in text(message).splitlines() if line.startswith("partitioned")]
    assert row.endswith("1,234 sequences after 90.0 s, over sets of 8 GPUs")
    assert "partition" in message["policies"][0]["sources"]


def test_the_ratios_of_units_are_all_told(capsys):
    argv = ("--model", "qwen3-30b-a3b", "--hardware", "h100x4", "--workload", "600:60x48", "--no-intervals")
    _, message = to_message(capsys, *argv, "--policies", "disaggregated:1")
    assert [row["text"] for row in message["policies"][0]["table"]] == [
        f"{count} prefill, {4 - count} decode" for count in (1, 2, 3)
    ]
    assert simulate_command([*argv, "--policies", "disaggregated:1"]) == 0
    assert "2 prefill, 2 decode" in capsys.readouterr().out


def test_lengths_are_spread_or_taken_from_a_file(capsys, tmp_path):
    _, message = to_message(capsys, *ONE, "--lengths", "cv=0.5")
    assert message["workload"]["cv"] == 0.5
    assert message["workload"]["longest"] > 660
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("100 20\n300 40\n")
    _, message = to_message(capsys, *ONE[:4], *ONE[6:], "--lengths", lengths, "--num", 5)
    assert message["workload"]["prompt_tokens"] == 100 * 3 + 300 * 2


@pytest.mark.parametrize("batch", [["--workload", "600:60x75,60:6x25"], ["--lengths", "FILE"]])
@pytest.mark.parametrize("number", [20, 120])
def test_fewer_or_more_requests_than_a_batch_has_keep_its_mix(capsys, tmp_path, batch, number):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("600 60\n" * 75 + "60 6\n" * 25)
    argv = [str(lengths) if one == "FILE" else one for one in batch]
    _, message = to_message(capsys, *ONE[:4], *ONE[6:], *argv, "--num", number)
    assert message["workload"]["prompt_tokens"] == number * (3 * 600 + 60) // 4


@pytest.mark.parametrize("number", [20, 60])
def test_a_batch_keeps_its_mix_in_whatever_order_its_lengths_are(capsys, tmp_path, number):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("600 60\n600 60\n600 60\n60 6\n" * 10)
    _, message = to_message(capsys, *ONE[:4], *ONE[6:], "--lengths", lengths, "--num", number)
    assert message["workload"]["prompt_tokens"] == number * (3 * 600 + 60) // 4


def test_a_batch_that_is_too_large_is_named_by_the_flag_that_gives_its_size(capsys):
    said = error_of(capsys, *ONE, "--workload", "600:60x2000000")
    assert "--workload is 600:60x2000000, of 2,000,000 requests; give at most 1,000,000" in said


@pytest.mark.parametrize("workload", ["1:1", "4:4"])
def test_a_batch_of_a_few_tokens_is_simulated_on_many_gpus(capsys, workload):
    argv = ("--model", "deepseek-r1", "--hardware", "h20x16", "--num", "1", "--workload", workload, "--no-intervals")
    code, message = to_message(capsys, *argv, "--policies", "batchgen,sglang")
    assert (code, [one["counts"]["finished"] for one in message["policies"]]) == (0, [1, 1])


def test_an_instance_of_a_number_of_gpus_that_fits_nowhere_is_named_with_those_that_fit(capsys):
    argv = ("--model", "deepseek-r1", "--hardware", "h20x16", "--num", "4", "--workload", "64:8", "--no-intervals")
    for gpus in (32, 3):
        _, message = to_message(capsys, *argv, "--policies", f"sglang:{gpus},batchgen")
        why = message["policies"][0]["why"]
        assert f"an instance of {gpus} GPUs, as sglang:{gpus} asks for" in why
        assert "on the 16 of h20x16; those that fit have" in why


def test_a_run_that_is_stopped_says_how_many_have_ended(capsys):
    argv = (*ONE[:4], "--workload", "600:60x20000", *ONE[6:])
    _, message = to_message(capsys, *argv, "--until", "8s")
    assert message["until_s"] == 8
    assert 0 < message["policies"][0]["counts"]["finished"] < 20000


def test_runs_that_are_stopped_differ_in_what_has_ended_and_have_no_ratio_of_times(capsys):
    argv = (*ONE[:4], "--workload", "600:60x20000", "--no-intervals", "--policies", "sglang,vllm")
    _, message = to_message(capsys, *argv, "--until", "8s")
    assert not any("ratio" in one for one in message["policies"])
    assert "of the first" not in text(message)
    _, message = to_message(capsys, *argv[:4], *FAST[4:], *argv[6:], "--until", "1h")
    assert message["policies"][1]["ratio"] > 0
    assert "of the first" in text(message)


def test_shares_of_a_short_run_add_up(capsys):
    _, message = to_message(capsys, *ONE[:4], "--workload", "1:1x1", *ONE[6:])
    one = message["policies"][0]
    assert 0 < one["seconds"] < 0.05
    for shares in (one["parts_s"], one["bounds_s"]):
        assert sum(shares.values()) == pytest.approx(one["seconds"], rel=0.01)


def test_more_host_memory_holds_more_kv(capsys):
    argv = ("--model", "mixtral-8x7b", "--hardware", "a5000x1", "--workload", "4000:100x300", "--no-intervals")
    found = []
    for size in ("300G", "1T"):
        _, message = to_message(capsys, *argv, "--policies", "flexgen", "--host-memory", size)
        found.append(message["policies"][0]["seconds"])
    assert found[1] < found[0]


@pytest.mark.parametrize("name", ["run.svg", "run.png"])
def test_a_plot_shows_every_policy(capsys, tmp_path, name):
    target = tmp_path / name
    code, message = to_message(capsys, *FAST, "--policies", "sglang,vllm", "--no-intervals", "--plot", target)
    assert (code, message["plot"]) == (0, str(target))
    if name.endswith("svg"):
        drawn = target.read_text()
        assert all(word in drawn for word in ("SGLang", "vLLM", "experts", "tokens/s"))
    else:
        assert target.read_bytes().startswith(b"\x89PNG")


def test_calibration_finds_the_fixed_time_of_a_pass(capsys, tmp_path):
    _, plain = to_message(capsys, *ONE)
    run = plain["policies"][0]
    cells = tmp_path / "cells.csv"
    measured = run["seconds"] + run["steps"] * 0.02
    cells.write_text(
        f"hardware,model,engine,workload,seconds\nh100x1,qwen3-30b-a3b,sglang,600:60x48,{measured}\n", encoding="utf-8"
    )
    _, message = to_message(capsys, *ONE, "--calibrate", cells)
    (found,) = message["calibration"]
    assert 0.018 < found["step_s"] < 0.023
    assert not found["is_bound"]
    assert list(found["ratios"].values()) == [pytest.approx(1, abs=0.001)]
    assert message["policies"][0]["seconds"] == pytest.approx(measured, rel=0.001)
    assert simulate_command([*ONE, "--calibrate", str(cells)]) == 0
    assert "fixed in each pass" in capsys.readouterr().out


def test_cells_that_no_fixed_time_explains_are_marked(capsys, tmp_path):
    cells = tmp_path / "cells.csv"
    cells.write_text("hardware,model,engine,workload,seconds\nh100x1,qwen3-30b-a3b,sglang,600:60x48,0.001\n")
    _, message = to_message(capsys, *ONE, "--calibrate", cells)
    assert message["calibration"][0]["is_bound"]


def test_a_policy_that_does_not_fit_stands_beside_those_that_do(capsys):
    argv = ("--model", "deepseek-r1", "--hardware", "h20x1", "--workload", "512:16x8", "--no-intervals")
    code, message = to_message(capsys, *argv, "--policies", "sglang,batchgen")
    assert code == 0
    assert "does not fit h20x1" in message["policies"][0]["why"]
    assert message["policies"][1]["counts"]["finished"] == 8
    assert simulate_command([*argv, "--policies", "sglang"]) == 1
    assert "does not run: DeepSeek-R1" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--model", "deepseek-r9"), "no model 'deepseek-r9'"),
        (("--hardware", "h999x8"), "no cluster 'h999x8'"),
        (("--hardware", "h100"), "as in h20x16"),
        (("--policies", "sglnag"), "no policy 'sglnag'"),
        (("--workload", "8192"), "PROMPT:OUTPUT"),
        (("--num", "0"), "--num is 0"),
        (("--lengths", "cv=lots"), "cv=0.3"),
        (("--lengths", "cv=9"), "at most 3"),
        (("--lengths", "missing.txt"), "leave --workload out"),
        (("--until", "10"), "--until is '10'"),
        (("--policies", "sglang:0"), "GPUs of an instance"),
        (("--host-memory", "much"), "--host-memory is 'much'"),
        (("--plot", "run.jpg"), "--plot is run.jpg"),
        (("--calibrate", "missing.csv"), "missing.csv cannot be read"),
    ],
)
def test_mistakes_are_one_line(capsys, argv, said):
    assert said in error_of(capsys, *ONE, *argv)


def test_a_file_of_lengths_with_a_hole_is_refused_with_its_line(capsys, tmp_path):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("100 20\n300\n")
    assert "line 2 of" in error_of(capsys, *ONE[:4], "--lengths", lengths)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hardware,model,engine,seconds\n", "no column 'workload'"),
        ("hardware,model,engine,workload,seconds\n", "has no cells"),
        ("hardware,model,engine,workload,seconds\nh100x1,qwen3-30b-a3b,sglang,600:60x48,-3\n", "line 2 .*'-3' seconds"),
        ("hardware,model,engine,workload,seconds\nh100x1,qwen3-30b-a3b,sglang,600:60x48\n", "line 2 .* has no seconds"),
        ("hardware,model,engine,workload,seconds\nh100x1,qwen3-30b-a3b,slang,600:60x48,3\n", "line 2 .*no policy"),
    ],
)
def test_cells_that_cannot_be_used_are_refused_with_their_line(capsys, tmp_path, text, said):
    cells = tmp_path / "cells.csv"
    cells.write_text(text)
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(error_of(capsys, *ONE, "--calibrate", cells))


@pytest.mark.parametrize("missing", ["hidden_size", "num_attention_heads", "vocab_size"])
def test_a_configuration_without_a_field_is_refused_by_its_name(capsys, tmp_path, missing):
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    del config[missing]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert missing in error_of(capsys, "--model", tmp_path, *ONE[2:])


def test_help_teaches_with_examples_and_every_policy(capsys):
    said = simulate_parser().format_help()
    assert said.count("sgl-batch simulate --model") >= 5
    assert all(name in said for name in ("batchgen", "disaggregated", "offload", "exit codes"))
