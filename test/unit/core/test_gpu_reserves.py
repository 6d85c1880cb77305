"""What is reserved of a GPU's budget: measured if possible, else a named constant."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sgl_batch.core.gpu_reserves import (
    CONTEXT_BYTES,
    EXCHANGE_BYTES,
    WORKSPACE_BYTES,
    GpuReading,
    GpuUse,
    check_gpu_has,
    gpu_reserves,
)
from sgl_batch.errors import ConfigError

MIB = 1 << 20
BEFORE = GpuReading(free=80_000 * MIB, held=0, processors=132)
USE = GpuUse(
    shares_gpu=False,
    exchanges=False,
    decode_rows=256,
    graph_rows=0,
    attention_row_bytes=0,
    attention_workspace_bytes=0,
)
ALWAYS = {"CUDA's context": CONTEXT_BYTES, "workspaces of matrix products": WORKSPACE_BYTES}


def after(*, weights: int, others: int = 0) -> GpuReading:
    """Return a reading after weights were loaded and libraries have taken memory."""
    return replace(BEFORE, free=BEFORE.free - (weights + others) * MIB, held=weights * MIB)


@pytest.mark.parametrize(
    ("now", "use", "reserves"),
    [
        (after(weights=30_000), USE, {}),
        (after(weights=30_000, others=250), USE, {"libraries": 250 * MIB}),
        (after(weights=30_000, others=-9), USE, {}),
        (after(weights=30_000, others=250), replace(USE, shares_gpu=True), {}),
        (after(weights=30_000), replace(USE, exchanges=True), {"exchange between ranks": EXCHANGE_BYTES}),
        (
            after(weights=30_000),
            replace(USE, attention_row_bytes=MIB, graph_rows=64),
            {"decode graphs": 128 * MIB, "partial results of attention": (256 + 64) * MIB},
        ),
        (
            after(weights=30_000),
            replace(USE, attention_workspace_bytes=512 * MIB),
            {"partial results of attention": 512 * MIB},
        ),
    ],
)
def test_libraries_are_measured_and_the_rest_follows_from_the_use(now, use, reserves):
    assert gpu_reserves(BEFORE, now, use) == {**ALWAYS, **reserves}


def test_a_budget_beyond_what_the_gpu_has_free_is_refused():
    check_gpu_has(BEFORE.free + CONTEXT_BYTES, BEFORE)
    with pytest.raises(ConfigError, match=r"device_memory is 80.00 GiB, and the GPU has 78.88 GiB free: lower --dev"):
        check_gpu_has(80 << 30, BEFORE)
