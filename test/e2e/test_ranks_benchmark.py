"""The benchmark of ranks with real engines: skewed routing loads one rank more, is counted, and changes no token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_skewed_routing_loads_one_rank_and_makes_the_other_wait(repo_root: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(repo_root / "benchmark" / "ranks.py"), "--workload", "skewed", "--rounds", "1"]
    command += ["--model", str(repo_root / "test" / "models" / "tiny-qwen3-moe"), "--out", str(tmp_path)]
    command += ["--num-prompts", "8", "--input-tokens", "512", "--output-tokens", "48"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    (workload,) = json.loads((tmp_path / "record.json").read_text())["workloads"]
    (found,) = workload["rounds"]
    even, skewed, one_rank = (found[case["name"]] for case in workload["cases"])
    assert skewed["outputs"] == one_rank["outputs"] != even["outputs"]
    routed = [sum(rank["tokens_per_expert"]) for rank in skewed["ranks"]]
    assert routed[0] > 1.5 * routed[1], "rank 0 has the hot experts"
    assert sum(routed) == sum(sum(rank["tokens_per_expert"]) for rank in even["ranks"])
    per_expert = one_rank["ranks"][0]["tokens_per_expert"]
    assert min(per_expert[:4]) > max(per_expert[4:])
    assert all(rank["part_s"]["stall"] > 0 for rank in skewed["ranks"])
    assert all(rank["counters"]["prefill_us"] > 0 for rank in even["ranks"])
    if len(os.sched_getaffinity(0)) > 1:
        assert not set(even["cores"][0]) & set(even["cores"][1]), "each rank has cores of its own"
    assert "skewed, one rank: the same tokens in all rounds." in done.stdout
