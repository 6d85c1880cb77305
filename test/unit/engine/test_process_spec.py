"""How a scheduler process of an engine begins, with a substitute for its GPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_batch.config import BatchConfig
from sgl_batch.engine import process_spec as process_spec
from sgl_batch.engine.process_spec import ProcessSpec, run_scheduler_process


def test_a_process_takes_its_own_gpu_before_anything_asks_for_the_current_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    def note(name: str) -> Any:
        return lambda *args, **kwargs: asked.append(f"{name} {args[0]}" if args else name)

    monkeypatch.setattr(process_spec, "_begin_as_child", lambda _spec: None)
    monkeypatch.setattr(process_spec, "_is_on_cpu", lambda: False)
    monkeypatch.setattr(process_spec, "register_shared_memory", lambda *_: None)
    monkeypatch.setattr(process_spec, "register_triton_attention", lambda: None)
    monkeypatch.setattr(process_spec.processes, "load_file", lambda _: tmp_path)
    monkeypatch.setattr(process_spec.processes, "run_scheduler_with", lambda *args, **kwargs: asked.append("SGLang"))
    monkeypatch.setattr(process_spec.torch.cuda, "set_device", note("set_device"))
    monkeypatch.setattr(process_spec.torch.cuda, "get_device_name", note("get_device_name"))
    monkeypatch.setattr(process_spec, "GpuExperts", note("experts"))
    spec = ProcessSpec(config=BatchConfig(), directory=tmp_path, start_method="spawn", graphs=note("graphs"))
    server_args = SimpleNamespace(dp_size=1, model_path="model", revision=None, load_format="dummy")
    run_scheduler_process(spec, server_args, None, 3, 0, 0, 0, 0, 0, None, None)
    assert asked == ["set_device 3", "get_device_name", "experts auto", "graphs", "SGLang"]


def test_the_modules_that_a_fork_server_imports_exist() -> None:
    missing = [name for name in ProcessSpec.preloaded if find_spec(name) is None]
    assert missing == [], "a fork server ignores a module that it cannot import"
    assert ProcessSpec.__module__ in ProcessSpec.preloaded
