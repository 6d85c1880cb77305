"""Memory stays flat from 1,000 to 100,000 lines, even though all of them wait for the first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from in_memory_engine import request

PROGRAM = Path(__file__).with_name("run_flat.py")
FEW, MANY = 1_000, 100_000
ALLOWED_GROWTH_MIB = 20


def peak_mib(directory, num_lines):
    directory.mkdir()
    path = directory / "in.jsonl"
    with path.open("w") as file:
        for index in range(num_lines):
            prompt = "wait" if index == 0 else "x" * 300
            file.write(json.dumps(request(f"request-{index}", prompt)) + "\n")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    with (directory / "out.jsonl").open() as file:
        assert sum(1 for _ in file) == num_lines
    return float(done.stdout)


def test_memory_is_flat_from_1000_to_100000_lines_that_wait_for_the_first(tmp_path):
    few = peak_mib(tmp_path / "few", FEW)
    many = peak_mib(tmp_path / "many", MANY)
    assert many - few < ALLOWED_GROWTH_MIB, f"{few:.1f} MiB for {FEW} lines, {many:.1f} MiB for {MANY}"
