"""Memory for KV is taken ahead where pages get it on their first write, and no more than a share of what is free."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_batch.config import BatchConfig, MemoryConfig
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.distributed.rendezvous import Rendezvous
from sgl_batch.mem_cache.device_page_pool import DevicePagePool
from sgl_batch.memory import page_advice
from sgl_batch.model_executor.run_context import RunContext
from sgl_batch.startup.kv_ahead import kv_ahead

HUGE = 2 << 20
LAYERS, PAGE_SIZE, HEADS, DIM = 2, 64, 8, 64
TOKEN_BYTES = LAYERS * 2 * HEADS * DIM * 2


@pytest.fixture(autouse=True)
def _nothing_is_taken(monkeypatch):
    monkeypatch.setattr(page_advice, "advise", lambda *_: True)


def runner(*, pool: Any = None, running: int = 512, context_len: int = 4096, weight_bytes: int = 1 << 40) -> Any:
    return SimpleNamespace(
        token_to_kv_pool=pool or DevicePagePool(1 << 16, PAGE_SIZE, torch.bfloat16, HEADS, DIM, LAYERS, "cpu", False),
        server_args=SimpleNamespace(page_size=PAGE_SIZE),
        model_config=SimpleNamespace(context_len=context_len),
        kv_token_bytes=TOKEN_BYTES,
        max_running_requests=running,
        weight_bytes=weight_bytes,
    )


def taken(runner: Any, tmp_path: Any, *, free: int = 1 << 40, **memory: Any) -> int:
    """Return how many bytes are taken ahead in all."""
    context = RunContext(
        in_force=PlanInForce(BatchConfig(memory=MemoryConfig(**memory))), rendezvous=Rendezvous(tmp_path)
    )
    ahead = kv_ahead(runner, context, free=lambda: free)
    while ahead.step():
        pass
    return ahead.taken_bytes


def test_it_is_at_most_a_sixteenth_of_the_free_memory(tmp_path):
    assert taken(runner(), tmp_path, free=16 * 6 * HUGE) == 6 * HUGE


def test_it_is_at_most_what_the_largest_batch_needs(tmp_path):
    need = 4 * 1024 * TOKEN_BYTES
    assert need - HUGE < taken(runner(running=4, context_len=1000), tmp_path) <= need


def test_it_is_at_most_what_the_weights_take(tmp_path):
    assert taken(runner(weight_bytes=5 * HUGE), tmp_path) == 5 * HUGE


def test_it_is_at_most_the_pool(tmp_path):
    pool_bytes = (1 << 16) * TOKEN_BYTES
    parts = 2 * LAYERS
    assert pool_bytes - parts * HUGE <= taken(runner(), tmp_path) <= pool_bytes + parts * HUGE


def test_streamed_weights_keep_the_free_memory(tmp_path):
    assert taken(runner(), tmp_path, weights="streamed") == 0


def test_a_pool_that_has_its_memory_takes_none(tmp_path):
    assert taken(runner(pool=SimpleNamespace(layer_num=LAYERS)), tmp_path) == 0
