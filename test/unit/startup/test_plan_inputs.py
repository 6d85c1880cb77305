"""When a start is planned, and what keeps the defaults instead: each in one line, and never an error."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import made_profiles as made
import pytest

from sgl_batch.config import BatchConfig, from_mapping
from sgl_batch.errors import ConfigError
from sgl_batch.planner.workload import parse_workload
from sgl_batch.startup import plan_inputs
from sgl_batch.startup.kept_profile import keep_profile, machine_facts, profile_path
from sgl_batch.startup.plan_inputs import plan_start, predicted

TINY = Path(__file__).resolve().parents[3] / "test" / "models" / "tiny-qwen3-moe"
KINDS = {"dtype": "bfloat16", "weight_dtype": "auto"}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def kept():
    """Keep a profile of this machine, with changes."""

    def keep(**changes):
        profile = replace(made.profile(), machine=machine_facts(TINY, **KINDS))
        keep_profile(profile_path(TINY, **KINDS), replace(profile, **changes))

    keep()
    return keep


def planned(arguments=None, workload=lambda _: None, *, on_cpu=True, **given):
    config = from_mapping(given)
    plan = plan_start(config, given.keys(), {"model_path": str(TINY), **(arguments or {})}, workload, on_cpu=on_cpu)
    if plan.prediction is None:
        assert plan.config == config
        assert plan.source.startswith("conservative defaults (")
        assert "\n" not in plan.source
    return plan


def test_without_a_profile_the_defaults_hold_and_the_command_is_named():
    plan = planned()
    assert f"no profile of this model in bfloat16 on this machine; sgl-batch plan --model {TINY}" in plan.source
    assert "no profile" in planned(cpu_weight_dtype="int8").source
    assert "--profile --cpu-weight-dtype int8 makes one" in planned(cpu_weight_dtype="int8").source
    assert predicted(plan, parse_workload("8:4x2")) is None


def test_no_profile_is_of_rounded_activations(kept):
    source = planned(cpu_weight_dtype="int8", cpu_activations="int8").source
    assert source == "conservative defaults (profiles are of the model's own activations)"


def test_with_a_profile_the_start_is_planned_for_the_default_workload(kept):
    plan = planned()
    assert plan.workload.count == 256
    assert "(by default, 128:128x256)" in plan.source
    assert predicted(plan, parse_workload("8:4x2")).seconds > 0


def test_the_batch_that_is_known_comes_before_the_default_and_workload_before_both(kept):
    known = lambda _: parse_workload("8:4x7")  # noqa: E731
    assert planned(workload=known).workload.count == 7
    config = from_mapping({"workload": "8:4x9"})
    plan = plan_start(config, {"workload"}, {"model_path": str(TINY)}, known, on_cpu=True)
    assert (plan.workload.count, plan.workload.source) == (9, "--workload 8:4x9")


def test_a_workload_that_cannot_be_read_is_the_users_mistake_with_and_without_a_profile():
    with pytest.raises(ConfigError, match="--workload is 'x'"):
        plan_start(from_mapping({"workload": "x"}), {"workload"}, {"model_path": str(TINY)}, on_cpu=True)


@pytest.mark.parametrize(
    ("arguments", "given", "why"),
    [
        ({}, {"plan": "off"}, "conservative defaults (--plan off)"),
        ({"dp_size": 2}, {}, "several ranks are not planned"),
        ({"json_model_override_args": '{"num_hidden_layers": 2}'}, {}, "flags change the model"),
        ({"quantization": "fp8"}, {}, "flags change the model"),
        ({}, {"mix_prefill": 64}, "mix_prefill is not predicted"),
        ({"model_path": "nowhere/at-all"}, {}, "there is no model directory nowhere/at-all"),
        ({"dtype": "float8"}, {}, "no profile of this model in float8"),
        ({}, {"device_memory": "100M"}, "no plan fits"),
    ],
)
def test_what_is_not_planned_is_said(kept, arguments, given, why):
    assert why in planned(arguments, **given).source


def test_on_a_gpu_nothing_is_planned(kept):
    assert "profiles are of CPUs so far" in planned(on_cpu=False).source


def test_a_profile_of_another_machine_is_not_used(kept):
    kept(machine=made.MACHINE)
    assert "of another processor" in planned().source


def test_a_profile_made_under_load_is_not_used(kept):
    kept(load=1000.0)
    assert "other programs kept 1000 of" in planned().source


def test_a_file_that_is_no_profile_is_not_used():
    path = profile_path(TINY, **KINDS)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"format": "sgl_batch.profile/1"}))
    assert "is no profile" in planned().source


def test_a_fault_of_planning_never_keeps_an_engine_from_starting(kept, monkeypatch):
    def fails(*_, **__):
        raise ZeroDivisionError("a fault\nof two lines")

    monkeypatch.setattr(plan_inputs, "choose", fails)
    assert planned().source == "conservative defaults (planning failed: ZeroDivisionError: a fault)"


def test_the_pool_and_the_context_limit_what_is_planned(kept):
    plan = planned({"max_total_tokens": 64 * 40}, lambda _: parse_workload("64:64x200"))
    rows = plan.prediction.mean_rows
    assert rows <= 20, "two pages of forty for each sequence"
    assert planned({"context_length": 200}, lambda _: parse_workload("64:5000x8")).workload.longest == 200
    assert planned({"max_running_requests": 6}).config.forward.b_moe_decode <= 6
    assert planned(b_moe_decode=BatchConfig().forward.b_moe_decode).chosen.get("b_moe_decode") is None
