"""Stock SGLang stays stock: a platform of ours is named only where this process was started for it."""

from __future__ import annotations

import importlib
import tomllib

import pytest

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.names import CPU_PLATFORM, STOCK_CPU_PLATFORM
from sgl_batch.sglang_adapter.platform_entry import activate, activate_stock


@pytest.mark.parametrize("value", [None, "", "cpu", "cuda", "SGL_BATCH_CPU", CPU_PLATFORM + " "])
def test_neither_platform_is_active_unless_asked_for_by_its_name(monkeypatch, value):
    if value is None:
        monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    else:
        monkeypatch.setenv("SGLANG_PLATFORM", value)
    assert activate() is None
    assert activate_stock() is None


@pytest.mark.parametrize(
    ("name", "active", "inactive"),
    [(CPU_PLATFORM, activate, activate_stock), (STOCK_CPU_PLATFORM, activate_stock, activate)],
)
def test_the_platform_asked_for_is_active_and_the_other_is_not(monkeypatch, name, active, inactive):
    bootstrap.prepare()
    importlib.import_module("sglang")  # it asks for the platform's class when it is imported itself
    monkeypatch.setenv("SGLANG_PLATFORM", name)
    assert inactive() is None
    module, _, class_name = active().rpartition(".")
    assert isinstance(getattr(importlib.import_module(module), class_name), type)


def test_sglang_finds_each_platform_under_the_name_that_activates_it(monkeypatch, repo_root):
    project = tomllib.loads((repo_root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entries = project["entry-points"]["sglang.srt.platforms"]
    assert set(entries) == {CPU_PLATFORM, STOCK_CPU_PLATFORM}
    for name, target in entries.items():
        module, _, function = target.partition(":")
        monkeypatch.setenv("SGLANG_PLATFORM", name)
        assert getattr(importlib.import_module(module), function)() is not None


def test_stock_sglang_can_be_profiled_on_a_cpu():
    from torch.profiler import ProfilerActivity

    from sgl_batch.sglang_adapter.stock_cpu_platform import StockCpuPlatform

    platform = StockCpuPlatform()
    assert platform.get_torch_profiler_activity_str() == "CPU"
    assert platform.get_torch_profiler_activity() is ProfilerActivity.CPU
