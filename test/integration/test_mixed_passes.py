"""One pass over decode rows and prompts of real models gives what two give, to the bit, staged or not."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sgl_batch.sglang_adapter.names import CPU_PLATFORM

from .conftest import FAMILIES

pytestmark = pytest.mark.engine

EXPERT_LAYERS = {"tiny-qwen3-moe": 4, "tiny-mixtral": 4, "tiny-deepseek-v3": 3}


def test_all_is_as_in_two_passes_to_the_bit(model_path: Callable[[str], str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("mixed_pass_process.py"), tmp_path, *map(model_path, FAMILIES)],
        env={**os.environ, "SGLANG_PLATFORM": CPU_PLATFORM, "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    passes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
    forms = [(one["model"], one["dtype"], one["sink"], one["source"], one["b_attn"]) for one in passes]
    assert forms == list(itertools.product(FAMILIES, ("float32", "bfloat16"), (False, True), (False, True), (3, 64))), (
        "each model, in both number types, with and without stagings and sub-batches"
    )
    for one in passes:
        assert one["same_decode"], one
        assert one["same_prompts"], one
        assert one["same_kv"], one
        assert one["expert_calls"] == EXPERT_LAYERS[one["model"]], "one call a layer for the rows of both"
