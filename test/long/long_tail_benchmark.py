"""The benchmark of the last sequences with real engines: two at once, ranks that partition, and a record that grows.

pytest test/long/long_tail_benchmark.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_separate_engines_and_ranks_that_partition_give_the_same_tokens(repo_root: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(repo_root / "benchmark" / "ranks.py"), "long-tail", "--out", str(tmp_path)]
    command += ["--model", str(repo_root / "test" / "models" / "tiny-qwen3-moe"), "--rounds", "1"]
    command += ["--many", "100", "--input-tokens", "8", "--output-tokens", "8", "--boundary-tokens", "4"]
    command += ["--partition-least-tokens", "1", "--only", "a separate,a all"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    separate, ranks = json.loads((tmp_path / "record.json").read_text())["runs"]
    assert separate["outputs"] == ranks["outputs"]
    assert len(separate["engine_s"]) == len(separate["ranks"]) == len(ranks["ranks"]) == 2
    assert sum(rank["counters"].get("partitions", 0) for rank in ranks["ranks"]) > 0
    assert "a: the same tokens in all cases and rounds." in done.stdout
    assert not list(tmp_path.glob("*.gate")) + list(tmp_path.glob("*.ready"))
