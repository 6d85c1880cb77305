"""Passes of real models without an engine: one over decode rows and prompts gives what two give, to the bit, staged or
not; and a decode step makes the host wait for a GPU once, for its tokens, which no layer does.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sgl_batch.sglang_adapter.names import CPU_PLATFORM

from .conftest import FAMILIES
from .interpreter import INTERPRETED

pytestmark = pytest.mark.engine

# Of 5 decode rows and 26 prompt tokens, 3 at a time.
SUB_BATCHES = 2 + 9
EXPERT_LAYERS = {"tiny-qwen3-moe": 4, "tiny-mixtral": 4, "tiny-deepseek-v3": 3}


class Wait(NamedTuple):
    """What the host waits for in every decode step on a CPU, how often, and why that is right."""

    where: str
    kind: str
    times: int
    why: str


ALLOWED = (
    Wait("test", ".tolist", 1, "the step's tokens, which the host looks at for ends and answers"),
    Wait(
        "sgl_batch/metrics/counters.py:add_expert_call",
        "aten::_local_scalar_dense",
        2 * EXPERT_LAYERS[FAMILIES[0]],
        "a CPU's operators count the rows of experts; those of a GPU do not",
    ),
)


@pytest.fixture(scope="module")
def told(model_path: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a process has told of passes over all models."""
    tmp_path = tmp_path_factory.mktemp("passes")
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("mixed_pass_process.py"), tmp_path, *map(model_path, FAMILIES)],
        env={**os.environ, "SGLANG_PLATFORM": CPU_PLATFORM, "OPENBLAS_NUM_THREADS": "1", **INTERPRETED},
        stdout=subprocess.PIPE,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]


def test_all_is_as_in_two_passes_to_the_bit(told: list[dict[str, Any]]) -> None:
    passes = [one for one in told if "same_decode" in one]
    staged = [(*one, True, False) for one in itertools.product((False, True), (False, True), (3, 64))]
    free = [(False, False, 3, accumulate, True) for accumulate in (True, False)]
    names = ("model", "dtype", "sink", "source", "b_attn", "accumulate", "any_order")
    assert [tuple(one[name] for name in names) for one in passes] == [
        (*model, *form)
        for model in (*((family, "float32") for family in FAMILIES), (FAMILIES[0], "bfloat16"))
        for form in (*staged, *free)
    ], "each model, one in bfloat16: with and without stagings and sub-batches, and units in any order"
    for one in passes:
        assert one["same_decode"], one
        assert one["same_prompts"], one
        assert one["same_kv"], one
        calls = 1 if one["accumulate"] else SUB_BATCHES
        assert one["expert_calls"] == calls * EXPERT_LAYERS[one["model"]], "for the rows of both parts"


def test_a_callback_at_yield_points_changes_the_kv_that_it_sets_and_no_other(told: list[dict[str, Any]]) -> None:
    by_callback = [(one.pop("callback"), one.pop("model"), one) for one in told if "callback" in one]
    changes = {
        "same_pass": True,
        "same_kv": False,
        "other_layers_same": True,
        "layer_rounded": True,
        "same_next_step": False,
    }
    stays = {**dict.fromkeys(changes, True), "layer_rounded": False}
    assert by_callback == [
        ("round_kv", FAMILIES[0], changes),
        ("round_kv", FAMILIES[-1], changes),
        ("leave_as_it_is", FAMILIES[0], stays),
    ]


def test_a_callback_is_refused_by_name_where_it_cannot_be(told: list[dict[str, Any]]) -> None:
    assert [one["refused"] for one in told if "refused" in one] == [
        "on_yield is 'yield_callbacks:round_kv', and kv_store_bytes is 1048576: the host KV store keeps copies of KV, "
        "which the callback would not change; leave out on_yield or kv_store_bytes"
    ]


# What the host waits for, counted as if the CPU were a GPU.


@pytest.fixture(scope="module")
def counted(told: list[dict[str, Any]]) -> list[Counter[tuple[str, str]]]:
    """A prefill, a decode step that opens a page, one as a graph, and one whose layers each look at a number."""
    (counted,) = [one["syncs"] for one in told if "syncs" in one]
    return [Counter({(where, kind): times for where, kind, times in found}) for found in counted if found]


def test_a_decode_step_waits_for_its_tokens_alone(counted: list[Counter[tuple[str, str]]]) -> None:
    allowed = {(wait.where, wait.kind): wait.times for wait in ALLOWED}
    assert dict(counted[1]) == allowed
    assert dict(counted[2]) == allowed, "as a graph"


def test_a_layer_that_looks_at_a_number_is_found(counted: list[Counter[tuple[str, str]]]) -> None:
    _, usual, _, planted = counted
    found = planted - usual
    assert {kind for _, kind in found} == {"aten::_local_scalar_dense"}
    assert found.total() == 2 * EXPERT_LAYERS[FAMILIES[0]], "for each of two sub-batches"


def test_a_prefill_waits_in_sglangs_own_code_and_for_its_tokens(counted: list[Counter[tuple[str, str]]]) -> None:
    allowed = {(wait.where, wait.kind) for wait in ALLOWED}
    assert {where for where, kind in counted[0].keys() - allowed} == {"sglang/srt/mem_cache/allocation.py:<listcomp>"}
