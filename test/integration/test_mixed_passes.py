"""Passes of real models without an engine. One pass over decode rows and prompts gives the bits of two passes, staged
or not. A decode step makes the host wait for a GPU once, for its tokens; no layer makes it wait.
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

# Sub-batches of 5 decode rows and of 26 prompt tokens, with 3 rows each. In the last layer two of the latter are read.
SUB_BATCHES, READ_SUB_BATCHES = 2 + 9, 2 + 2
EXPERT_LAYERS = {"tiny-qwen3-moe": 4, "tiny-mixtral": 4, "tiny-deepseek-v3": 3}


class Wait(NamedTuple):
    """A wait of the host in every decode step on a CPU, how often it occurs, and why it is allowed."""

    where: str
    kind: str
    times: int
    why: str


ALLOWED = (
    Wait("test", ".tolist", 1, "the host reads the step's tokens, for ends and answers"),
    Wait(
        "sgl_batch/metrics/counters.py:add_expert_call",
        ".numpy",
        EXPERT_LAYERS[FAMILIES[0]],
        "a CPU's operators count the rows of experts; those of a GPU do not",
    ),
)


@pytest.fixture(scope="module")
def results(model_path: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of a process that runs passes over all models."""
    tmp_path = tmp_path_factory.mktemp("passes")
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("mixed_pass_process.py"), tmp_path, *map(model_path, FAMILIES)],
        env={**os.environ, "SGLANG_PLATFORM": CPU_PLATFORM, "OPENBLAS_NUM_THREADS": "1", **INTERPRETED},
        stdout=subprocess.PIPE,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]


def test_a_mixed_pass_gives_the_bits_of_two_passes(results: list[dict[str, Any]]) -> None:
    passes = [one for one in results if "same_decode" in one]
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
        calls, in_last = (1, 1) if one["accumulate"] else (SUB_BATCHES, READ_SUB_BATCHES)
        expected = calls * (EXPERT_LAYERS[one["model"]] - 1) + in_last
        assert one["expert_calls"] == expected, "one call for the rows of both parts"


def test_a_callback_at_yield_points_changes_only_the_kv_that_it_sets(results: list[dict[str, Any]]) -> None:
    by_callback = [(one.pop("callback"), one.pop("model"), one) for one in results if "callback" in one]
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


def test_a_callback_is_refused_with_a_host_kv_store(results: list[dict[str, Any]]) -> None:
    assert [one["refused"] for one in results if "refused" in one] == [
        "on_yield is 'yield_callbacks:round_kv', and kv_store_bytes is 1048576: the host KV store keeps copies of KV, "
        "which the callback would not change; leave out on_yield or kv_store_bytes"
    ]


@pytest.fixture(scope="module")
def counted(results: list[dict[str, Any]]) -> list[Counter[tuple[str, str]]]:
    """Waits, counted as on a GPU: of a prefill, a decode step, one as a graph, and one whose layers read a number."""
    (counted,) = [one["syncs"] for one in results if "syncs" in one]
    return [Counter({(where, kind): times for where, kind, times in found}) for found in counted if found]


def test_a_decode_step_waits_only_for_its_tokens(counted: list[Counter[tuple[str, str]]]) -> None:
    allowed = {(wait.where, wait.kind): wait.times for wait in ALLOWED}
    assert dict(counted[1]) == allowed
    assert dict(counted[2]) == allowed, "as a graph too"


def test_a_layer_that_reads_a_number_on_the_host_is_counted(counted: list[Counter[tuple[str, str]]]) -> None:
    _, usual, _, planted = counted
    found = planted - usual
    assert {kind for _, kind in found} == {"aten::_local_scalar_dense"}
    assert found.total() == 2 * EXPERT_LAYERS[FAMILIES[0]], "one in each layer and each of two sub-batches"


def test_a_prefill_waits_only_in_sglangs_own_code_and_for_its_tokens(counted: list[Counter[tuple[str, str]]]) -> None:
    allowed = {(wait.where, wait.kind) for wait in ALLOWED}
    assert {where for where, kind in counted[0].keys() - allowed} == {"sglang/srt/mem_cache/allocation.py:<listcomp>"}
