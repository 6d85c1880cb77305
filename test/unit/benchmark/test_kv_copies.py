"""The benchmark of copies runs over every kind of store and prints a line of figures for each."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sgl_batch_kernel.kv_store")


def test_the_command_prints_a_line_for_each_size_kind_and_number_of_workers(repo_root: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(repo_root / "benchmark" / "kv_copies.py"), "--total-mib", "1", "--rounds", "2"]
    options = ["--part-kib", "4", "16", "--layers", "2", "--directory", str(tmp_path), "--checksums", "--sync"]
    result = subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    lines = re.findall(
        r"^ *(4|16) +(64|16)  (memory|shared|file) +(1|2)(?: +[\d.]+ \( ?[\d.]+- ?[\d.]+\)){3}", result.stdout, re.M
    )
    assert lines == [
        (size, pages, kind, workers)
        for size, pages in (("4", "64"), ("16", "16"))
        for kind in ("memory", "shared", "file")
        for workers in "12"
    ]
    assert len(re.findall(r"^submitting +\d+ pages: +[\d.]+ us, +[\d.]+ a page$", result.stdout, re.M)) == 3
