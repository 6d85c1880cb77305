"""Ranks that share the passes of a sequence compute the logits and KV of ranks that do not, bit for bit, on every rank.

The models are loaded without an engine, in one process for each rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from sgl_batch.sglang_adapter.names import CPU_PLATFORM

from .conftest import FAMILIES

pytestmark = pytest.mark.engine

SMALL = {"b_attn_decode": 2, "b_attn_prefill": 16}
TWO = [[0, 1]]
# Three sequences read so many bytes of KV in a layer of the first family, and one of them does not.
KV_OF_THREE = 44 << 10
# Family, number type, flags, sets of ranks, more of the works. Others run in test/long/partitioned_passes.py.
FORMS: list[tuple[str, str, dict[str, Any], list[list[int]], dict[str, Any]]] = [
    (FAMILIES[0], "bfloat16", {**SMALL, "cpu_weight_dtype": "int8"}, TWO, {}),
    (FAMILIES[0], "float32", {}, TWO, {"least_bytes": KV_OF_THREE, "by_hand": [1]}),
    (FAMILIES[1], "float32", {"token_dispatcher": "gloo"}, TWO, {}),
    (FAMILIES[2], "bfloat16", SMALL, TWO, {}),
    (FAMILIES[2], "float32", {}, [[0, 1], [2, 3]], {}),
]
# Logits of 8 passes, and KV of 3 sequences in 4 layers.
COMPARED = 8 + 3 * 4


def run_works(works: Iterable[dict[str, Any]], directory: Path) -> list[dict[str, Any]]:
    """Return what each rank of each work found."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("partitioned_pass_process.py"), directory, json.dumps([*works])],
        env={**os.environ, "SGLANG_PLATFORM": CPU_PLATFORM, "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]


def faults(found: dict[str, Any]) -> list[str]:
    """Return what is wrong with a rank's passes."""
    rank, own = found["rank"], [one for one in found["sets"] if found["rank"] in one]
    wrong = [f"rank {rank} of {own}: {name} differs" for name in found["wrong"]]
    if found["compared"] != COMPARED or not found["finite"]:
        wrong.append(f"rank {rank}: {found['compared']} compared, finite: {found['finite']}")
    if found["unshared_gathers"] or not found["gathers"]:
        wrong.append(f"rank {rank}: {found['unshared_gathers']} gathers alone, {found['gathers']} in a set")
    by_hand = rank in found["by_hand"] or found["flags"].get("token_dispatcher") == "gloo"
    if (found["recorded"] > 0) != (found["sets"] == TWO and not by_hand):
        wrong.append(f"rank {rank}: {found['recorded']} passes of a set of all from records")
    return wrong


def test_passes_that_ranks_share_have_the_bits_of_passes_that_they_do_not(
    model_path: Callable[[str], str], tmp_path: Path
) -> None:
    works = [
        {"model": model_path(family), "dtype": dtype, "flags": flags, "sets": sets, **more}
        for family, dtype, flags, sets, more in FORMS
    ]
    found = run_works(works, tmp_path)
    assert len(found) == sum(len(one) for work in works for one in work["sets"])
    assert [fault for one in found for fault in faults(one)] == []
