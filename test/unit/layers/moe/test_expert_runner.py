"""A runner that cannot run is refused by name, with those that can."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

from sgl_batch.config import EXPERT_RUNNERS
from sgl_batch.errors import ConfigError
from sgl_batch.layers.moe import expert_runner
from sgl_batch.layers.moe.expert_runner import ON_CPU, ON_GPU, check_experts, check_runner


def test_every_name_runs_somewhere_and_auto_everywhere():
    assert {"auto", *ON_CPU, *ON_GPU} == set(EXPERT_RUNNERS)
    check_runner("auto", on_cpu=True)
    check_runner("auto", on_cpu=False)


@pytest.mark.parametrize(
    ("name", "on_cpu", "message"),
    [
        ("sglang", True, "'sglang', which does not run on a CPU; choose auto, native, torch, triton"),
        ("deepgemm", True, "does not run on a CPU"),
        ("native", False, "'native', which does not run on a GPU; choose auto, sglang, triton, deepgemm, torch"),
    ],
)
def test_a_runner_for_the_other_device_is_refused_with_those_of_this_one(name, on_cpu, message):
    with pytest.raises(ConfigError, match=message):
        check_runner(name, on_cpu=on_cpu)


def test_triton_runs_on_a_cpu_by_its_interpreter_alone(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="set TRITON_INTERPRET=1"):
        check_runner("triton", on_cpu=True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_runner("triton", on_cpu=True)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(expert_runner, "native_kernels", lambda: None)
    with pytest.raises(ConfigError, match="the native kernels are not there: run scripts/install"):
        check_runner("native", on_cpu=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the package triton is not installed"):
        check_runner("triton", on_cpu=False)


@pytest.mark.parametrize(("activation", "on_input"), [("gelu", False), ("silu", True)])
def test_experts_that_no_runner_of_ours_computes_are_refused(activation, on_input):
    config = SimpleNamespace(activation=activation, apply_router_weight_on_input=on_input)
    with pytest.raises(ConfigError, match=f"activation='{activation}', apply_router_weight_on_input={on_input}"):
        check_experts(config)
