"""`sgl-batch plan` for GPUs of a data sheet: layouts, deadlines, sources of numbers, and what is said of mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sgl_batch.checkpoint.tensors import tensors_of
from sgl_batch.cli.plan.command import plan_command
from sgl_batch.config import from_mapping
from sgl_batch.core.supported_models import GPU
from sgl_batch.planner.needs import Model, Target, fit

TINY = Path(__file__).resolve().parents[3] / "test" / "models" / "tiny-qwen3-moe"
ON_H100 = ("--hardware", "H100-SXM", "--workload", "64:32x64")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def to_message(capsys, *argv):
    code = plan_command(["--model", str(TINY), *map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


def to_text(capsys, *argv):
    assert plan_command(["--model", str(TINY), *map(str, argv)]) == 0
    return capsys.readouterr().out


def error_of(capsys, *argv, model=TINY):
    assert plan_command(["--model", str(model), *map(str, argv)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("sgl-batch plan: error: ")
    assert said.count("\n") == 1
    return said


def test_a_plan_from_a_data_sheet_names_the_source_of_every_number(capsys):
    code, message = to_message(capsys, *ON_H100)
    assert code == 0
    assert message["hardware"]["source"] == "data sheet"
    assert message["hardware"]["assumptions"]["source"] == "assumed"
    assert message["hardware"]["measured"] is None
    assert message["plan"]["source"] == message["runner_up"]["source"] == "data sheet, assumed"
    assert message["memory"]["source"] == message["workload"]["source"] == "counted"


def test_shares_of_bounds_add_up_to_one_and_parts_to_the_time(capsys):
    plan = to_message(capsys, *ON_H100)[1]["plan"]
    assert sum(plan["bound_shares"].values()) == pytest.approx(1, abs=0.001)
    assert sum(plan["parts_s"].values()) == pytest.approx(plan["seconds"], abs=0.01)
    assert sum(plan["bounds_s"].values()) == pytest.approx(plan["seconds"], abs=0.01)
    assert {"memory", "fixed overhead"} <= set(plan["bound_shares"])


def test_the_text_never_calls_a_number_of_a_sheet_measured(capsys):
    said = to_text(capsys, *ON_H100, "--gpus", "2")
    assert all(source in said for source in ("data sheet", "assumed", "counted"))
    assert not any(source in said for source in ("measured here", "fitted"))
    assert "Nothing here was measured on a GPU" in " ".join(said.split())


def test_gpus_are_shared_out_and_every_layout_is_listed(capsys):
    _, message = to_message(capsys, *ON_H100, "--gpus", "4")
    ranks = [(one["instances"], one["ranks"], one["tensor_parallel"]) for one in message["layouts"]]
    assert ranks == [(4, 1, False), (2, 2, False), (1, 4, False), (2, 2, True), (1, 4, True)]
    assert all("modelled, not implemented" in one["label"] for one in message["layouts"] if one["tensor_parallel"])
    assert not message["plan"]["layout"]["tensor_parallel"]
    assert "label" not in message["plan"]["layout"]


def test_a_rank_holds_its_share_of_the_experts_and_of_the_store_and_all_else():
    fields = json.loads((TINY / "config.json").read_text())
    model = Model(config=fields, tensors=tensors_of(TINY, 4, cpu_weights=None), dtype="bfloat16")
    target = Target(device=GPU, budget=80 << 30, page_size=64, length=128)
    config = from_mapping({"kv_store_bytes": 1 << 30})
    whole, experts, streamable = model.weight_bytes()
    assert streamable == experts
    alone, rank, tensor = (
        fit(model, config, replace(target, **more)) for more in ({}, {"ranks": 4}, {"ranks": 4, "tensor": True})
    )
    assert (alone.uses["weights"], rank.uses["weights"]) == (whole, whole - experts * 3 // 4)
    assert tensor.uses["weights"] == pytest.approx(whole / 4, abs=4)
    assert "exchange between ranks" in rank.uses
    assert "exchange between ranks" not in alone.uses
    assert rank.in_store == alone.in_store // 4


def test_the_flags_of_ranks_are_those_of_the_chosen_layout(capsys):
    _, message = to_message(capsys, *ON_H100, "--gpus", "2")
    assert ("--enable-dp-attention" in message["run_flags"]) == (message["plan"]["layout"]["ranks"] > 1)


def test_several_instances_are_one_run(capsys):
    said = to_text(capsys, *ON_H100, "--gpus", "2")
    chosen = to_message(capsys, *ON_H100, "--gpus", "2")[1]["plan"]["layout"]
    assert ("--instances 2" in said) == (chosen["instances"] == 2)


def test_instances_of_this_machine_are_none_of_other_hardware(capsys):
    said = error_of(capsys, "--model", TINY, *ON_H100, "--instances", "2")
    assert "--gpus" in said


def test_a_deadline_that_is_met_says_by_how_much(capsys):
    found = to_message(capsys, *ON_H100, "--deadline", "1h")[1]
    deadline = found["deadline"]
    assert deadline["fits"]
    assert deadline["requests"] == 64
    assert deadline["spare_s"] == pytest.approx(3600 - found["plan"]["seconds"], abs=0.01)
    assert "before the deadline of 60.0 min" in deadline["text"]


def test_a_deadline_that_is_missed_says_how_many_requests_are_done(capsys):
    base = ("--hardware", "L4", "--workload", "64:32x600")
    whole_s = to_message(capsys, *base)[1]["plan"]["seconds"]
    code, message = to_message(capsys, *base, "--deadline", f"{whole_s / 2:.3f}s")
    found = message["deadline"]
    assert (code, found["fits"]) == (0, False)
    assert 0 < found["requests"] < 600
    assert found["requests_s"] <= found["deadline_s"]
    assert f"{found['requests']:,} of 600 requests" in found["text"]


def test_a_deadline_in_which_nothing_is_done_says_so(capsys):
    said = to_text(capsys, *ON_H100, "--deadline", "0.0001s")
    assert "too short for even one request" in " ".join(said.split())


def test_mistakes_are_one_line_each(capsys, tmp_path):
    assert "RTX-4090" in error_of(capsys, "--hardware", "H9000")
    assert "from 1 to 4,096" in error_of(capsys, "--hardware", "H200", "--gpus", "0")
    assert "'two'" in error_of(capsys, "--hardware", "H200", "--gpus", "two")
    assert "--gpus is for GPUs" in error_of(capsys, "--gpus", "2")
    assert "90s, 10m or 1.5h" in error_of(capsys, "--deadline", "soon")
    assert "--deadline needs a prediction" in error_of(capsys, "--deadline", "10m")
    assert "--picture needs a prediction" in error_of(capsys, "--picture", tmp_path / "plan.svg")
    assert "leave one out" in error_of(capsys, "--hardware", "H200", "--profile")
    assert "--dtype bfloat16" in error_of(capsys, "--hardware", "H200", "--dtype", "float32")
    assert "is for CPUs" in error_of(capsys, "--hardware", "H200", "--cpu-weight-dtype", "int8")
    holes = tmp_path / "holes.txt"
    holes.write_text("128 32\n\n128\n")
    assert "line 3" in error_of(capsys, "--hardware", "H200", "--lengths", holes)
    holes.write_text("# nothing\n")
    assert "has no lengths" in error_of(capsys, "--hardware", "H200", "--lengths", holes)


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_config_without_a_field_is_named(capsys, tmp_path, field):
    fields = json.loads((TINY / "config.json").read_text())
    del fields[field]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert field in error_of(capsys, "--hardware", "H200", model=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**fields, field: "many"}))
    assert f"{field} in the model's config.json is no number" in error_of(capsys, model=tmp_path)


def test_any_other_number_that_is_none_is_refused(capsys, tmp_path):
    fields = json.loads((TINY / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "num_local_experts": "some"}))
    assert "'some'" in error_of(capsys, "--hardware", "H200", model=tmp_path)


@pytest.mark.parametrize(("method", "said"), [("awq", "quantised by awq"), ("fp8", "no such products")])
def test_weights_that_a_sheet_does_not_cover_are_refused(capsys, tmp_path, method, said):
    fields = json.loads((TINY / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "quantization_config": {"quant_method": method}}))
    (tmp_path / "model.safetensors").symlink_to(TINY / "model.safetensors")
    assert said in error_of(capsys, "--hardware", "A100-80G", model=tmp_path)


def test_too_little_memory_on_all_layouts_is_no_plan(capsys):
    code, message = to_message(capsys, *ON_H100, "--device-memory", "100M", "--gpus", "2")
    assert (code, message["plan"]) == (1, None)
    assert "one instance of 2 ranks" in message["why"]
    assert "--weights streamed" in message["why"]
