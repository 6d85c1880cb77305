"""Memory stays flat from 1,000 to 100,000 lines, even when all of them wait for the first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from in_memory_engine import request

PROGRAM = Path(__file__).with_name("run_flat.py")
FEW, MANY = 1_000, 100_000
ALLOWED_GROWTH_MIB = 20


def peak_mib(directory, num_lines, first_prompt):
    directory.mkdir()
    path = directory / "in.jsonl"
    with path.open("w") as file:
        for index in range(num_lines):
            prompt = first_prompt if index == 0 else "x" * 300
            file.write(json.dumps(request(f"request-{index}", prompt)) + "\n")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(path)], capture_output=True, text=True, check=True, timeout=300
    )
    with (directory / "out.jsonl").open() as file:
        assert sum(1 for _ in file) == num_lines
    return float(done.stdout)


@pytest.mark.parametrize("first_prompt", ["x", "wait"])
def test_memory_is_flat_from_1000_to_100000_lines(tmp_path, first_prompt):
    few = peak_mib(tmp_path / "few", FEW, first_prompt)
    many = peak_mib(tmp_path / "many", MANY, first_prompt)
    assert many - few < ALLOWED_GROWTH_MIB, f"{few:.1f} MiB for {FEW} lines, {many:.1f} MiB for {MANY}"
