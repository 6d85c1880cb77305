"""A model's tokens are the same on instruction sets that this machine can run beside its best: every second one.

The kernels alone are tested on all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sgl_batch_kernel

from sgl_batch import Engine

from .conftest import FAMILIES, Prompts, Reference
from .test_parity import generate

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("isa", sgl_batch_kernel.runnable_isas()[1::2])
def test_greedy_tokens_equal_huggingface_on_other_instruction_sets(
    isa: str,
    model_path: Callable[[str], str],
    reference: Callable[[str, str], Reference],
    prompts: Prompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGL_BATCH_ISA", isa)
    engine = Engine(
        model_path=model_path(FAMILIES[0]),
        dtype="float32",
        page_size=16,
        b_moe_prefill=700,
        b_moe_decode=8,
        boundary_tokens=8,
        max_total_tokens=16384,
    )
    try:
        assert engine._scheduler_init_result.scheduler_infos[0]["sgl_batch"]["kernels"] == isa
        assert generate(engine, prompts) == reference(FAMILIES[0], "float32").tokens
    finally:
        engine.shutdown()
