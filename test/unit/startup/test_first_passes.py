"""Memory of the first passes is taken as an engine starts: what they need, and no more than a share of what is free."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_batch.config import BatchConfig, MemoryConfig
from sgl_batch.core.device_budget import ModelShape
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.distributed.rendezvous import Rendezvous
from sgl_batch.model_executor.run_context import RunContext
from sgl_batch.startup import first_passes

MIB, GIB = 1 << 20, 1 << 30
SHAPE = ModelShape(
    hidden=1024,
    vocabulary=32000,
    layers=12,
    attention_width=1536,
    experts=64,
    top_k=8,
    expert_width=384,
    dense_width=0,
    item_bytes=2,
)


@pytest.fixture
def asked(monkeypatch: Any) -> list[int]:
    """Return the bytes that the kernels are asked for; they give them all."""
    asked: list[int] = []

    def reserve_memory(most_bytes: int, seconds: float, threads: int) -> int:
        assert seconds > 0
        assert threads >= 1
        asked.append(most_bytes)
        return most_bytes

    monkeypatch.setattr(first_passes, "native_kernels", lambda: SimpleNamespace(reserve_memory=reserve_memory))
    monkeypatch.setattr(first_passes, "model_shape", lambda _: SHAPE)
    return asked


def reserved(
    tmp_path: Any, *, free: int = 1 << 50, weight_bytes: int = 1 << 50, device: str = "cpu", **memory: Any
) -> int:
    """Return how many bytes are reserved."""
    in_force = PlanInForce(BatchConfig(memory=MemoryConfig(**memory)))
    in_force.fit(page_size=64, max_running=512, can_reenter=True)
    context = RunContext(in_force=in_force, rendezvous=Rendezvous(tmp_path))
    runner: Any = SimpleNamespace(device=device, model_config=None, weight_bytes=weight_bytes)
    return first_passes.reserve_first_passes(runner, context, free=lambda: free)


def test_it_is_what_a_group_of_the_plan_needs(asked, tmp_path):
    between_products = 8192 * SHAPE.top_k * SHAPE.expert_width * SHAPE.item_bytes
    assert between_products < reserved(tmp_path) < GIB
    assert len(asked) == 1


def test_it_is_at_most_a_share_of_what_is_free_and_of_the_weights(asked, tmp_path):
    assert reserved(tmp_path, free=64 * 10 * MIB) == 10 * MIB
    assert reserved(tmp_path, weight_bytes=8 * 6 * MIB) == 6 * MIB


@pytest.mark.parametrize("other", [{"device": "cuda"}, {"weights": "streamed"}])
def test_nothing_is_taken_beside_a_gpu_or_with_streamed_weights(asked, tmp_path, other):
    assert reserved(tmp_path, **other) == 0
    assert asked == []


def test_nothing_is_taken_without_the_native_kernels(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(first_passes, "native_kernels", lambda: None)
    assert reserved(tmp_path) == 0
