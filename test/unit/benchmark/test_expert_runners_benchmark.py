"""The benchmark of expert runners measures those of this machine and names the fastest of each number of tokens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from comparison.figures import Spread
from expert_runners import parse, table
from kernel_rates.shapes import Shapes

from sgl_batch.errors import ConfigError


def test_the_command_prints_a_line_for_each_number_of_tokens(repo_root: Path) -> None:
    command = [sys.executable, str(repo_root / "benchmark" / "expert_runners.py"), "--tokens", "1", "16"]
    result = subprocess.run(
        [*command, "--rounds", "2", "--sample-s", "0.001"], capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr
    lines = re.findall(r"^\| (\d+) \| [\d.]+ \| .*\*\*.*$", result.stdout, re.MULTILINE)
    assert lines == ["1", "16"]


def test_the_fastest_of_a_line_is_bold():
    def of(seconds: float) -> Spread:
        return Spread(median=seconds, low=seconds, high=seconds, count=1)

    found = {8: {"torch": of(0.002), "native": of(0.001)}, 64: {"torch": of(0.003), "native": of(0.004)}}
    assert table(found, Shapes(experts=16, top_k=2)).splitlines() == [
        "| tokens | per expert | torch | native |",
        "| ---: | ---: | ---: | ---: |",
        "| 8 | 1 | 2.000 | **1.000** |",
        "| 64 | 8 | **3.000** | 4.000 |",
    ]


def test_numbers_below_one_are_refused():
    with pytest.raises(ConfigError, match="a number below 1"):
        parse(["--tokens", "0"])
