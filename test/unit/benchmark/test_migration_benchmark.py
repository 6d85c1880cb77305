"""The migration benchmark runs between two real processes and prints one line of figures."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_the_command_prints_the_time_of_a_sequence(repo_root: Path) -> None:
    command = [sys.executable, str(repo_root / "benchmark" / "migration.py"), "--sequences", "2", "--pages", "1"]
    result = subprocess.run([*command, "--rounds", "2"], capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(
        r"2 sequences of 1 pages, 0\.8 MiB of bfloat16 KV each: [\d.]+ ms a sequence \(median of 2 rounds, "
        r"[\d.]+ to [\d.]+\), [\d.]+ GiB/s\n",
        result.stdout,
    )
