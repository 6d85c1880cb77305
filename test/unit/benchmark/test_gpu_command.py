"""The command of the GPU comparison, end to end: real engines with a tiny shape on a CPU, a record and a report."""

from __future__ import annotations

import json

import pytest
from gpu import main

pytestmark = pytest.mark.engine


def test_a_regime_runs_for_real_and_leaves_its_record(tmp_path, capsys):
    sizes = ["--num-prompts", "8", "--input-len", "8", "--output-len", "6"]
    where = ["--device", "cpu", "--scale", "tiny", "--out", str(tmp_path), "--rounds", "1", "--peers", "b_moe"]
    argv = ["accumulation", *sizes, *where, "--profile", "--profile-steps", "2"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == text.rstrip("\n") + "\n"
    assert [(visit["fault"], visit["round"]) for visit in record["visits"]] == [
        (None, 1),
        (None, 1),
        ("not available on a CPU", 1),
    ]
    plan, small = (visit["counters"] for visit in record["visits"][:2])
    assert plan["decode_groups"] == 5, "one group of all sequences a step"
    assert small["decode_groups"] == 5 * 8
    assert record["times_as_fast"]["count"] == 1
    assert "a trace without a GPU" in text
