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

# Of 5 decode rows and 26 prompt tokens, 3 at a time.
SUB_BATCHES = 2 + 9
EXPERT_LAYERS = {"tiny-qwen3-moe": 4, "tiny-mixtral": 4, "tiny-deepseek-v3": 3}


def test_all_is_as_in_two_passes_to_the_bit(model_path: Callable[[str], str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("mixed_pass_process.py"), tmp_path, *map(model_path, FAMILIES)],
        env={**os.environ, "SGLANG_PLATFORM": CPU_PLATFORM, "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    passes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
    staged = [(*one, True, False) for one in itertools.product((False, True), (False, True), (3, 64))]
    free = [(False, False, 3, accumulate, True) for accumulate in (True, False)]
    names = ("model", "dtype", "sink", "source", "b_attn", "accumulate", "any_order")
    assert [tuple(one[name] for name in names) for one in passes] == [
        (*model, *form) for model in itertools.product(FAMILIES, ("float32", "bfloat16")) for form in (*staged, *free)
    ], "each model, in both number types: with and without stagings and sub-batches, and units in any order"
    for one in passes:
        assert one["same_decode"], one
        assert one["same_prompts"], one
        assert one["same_kv"], one
        calls = 1 if one["accumulate"] else SUB_BATCHES
        assert one["expert_calls"] == calls * EXPERT_LAYERS[one["model"]], "for the rows of both parts"
