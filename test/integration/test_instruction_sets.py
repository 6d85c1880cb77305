"""A model's tokens are the same on the plainest instruction set, which every machine can run.

test_int8_weights.py runs others with int8 weights, and the tests of kernels run all instruction sets.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sgl_batch_kernel

from sgl_batch import Engine

from .conftest import FAMILIES, Prompts, Reference
from .test_parity import generate

pytestmark = pytest.mark.engine


def test_greedy_tokens_equal_huggingface_on_the_plainest_instruction_set(
    model_path: Callable[[str], str],
    reference: Callable[[str, str], Reference],
    prompts: Prompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    isa = sgl_batch_kernel.runnable_isas()[-1]
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
