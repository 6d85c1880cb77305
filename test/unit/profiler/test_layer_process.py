"""However short the time is, prefill and decode of each kind of layer are measured, and nothing more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_batch.profiler import layer_process


@pytest.mark.parametrize("within_s", [-1.0, 0.05])
def test_each_kind_is_measured_once_at_least(monkeypatch, within_s: float) -> None:
    measured = []

    def measure(size: Any, kind: str, layers: list[int]) -> Any:
        measured.append((kind, size.decode))
        return SimpleNamespace(kind=kind)

    monkeypatch.setattr(layer_process, "load", lambda _: SimpleNamespace(max_total_num_tokens=1 << 16))
    monkeypatch.setattr(layer_process, "TrialPasses", lambda _: SimpleNamespace(measure=measure))
    spec = {"within_s": within_s, "most_rows": 64, "most_tokens": 512, "pool_tokens": 1 << 14, "context": 512}
    found = list(layer_process.samples({**spec, "layers": {"dense": [0], "moe": [1, 2]}}))
    assert set(measured) == {(kind, decode) for kind in ("dense", "moe") for decode in (True, False)}
    assert len(found) == len(measured)
    if within_s < 0:
        assert len(measured) == 4
