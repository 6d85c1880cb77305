"""The benchmark of a large cluster, at a small size: what it refuses, and what it says of collapsed ranks."""

from __future__ import annotations

import re

import large_cluster
import pytest

from sgl_batch.errors import ConfigError


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    rows = "".join(f"t,{100 + 37 * number % 900},{1 + 53 * number % 300}\n" for number in range(50))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    return path


def _printed(capsys, trace, *flags: str) -> str:
    sizes = ("--ranks", "16", "--instances", "2", "--sequences", "160", "--alike", "4")
    assert large_cluster.main(["--trace", str(trace), *sizes, *flags]) == 0
    return capsys.readouterr().out


def test_collapsed_ranks_are_said_and_take_as_long(capsys, trace):
    every, collapsed = _printed(capsys, trace), _printed(capsys, trace, "--collapse")
    assert "collapsed: 4 ranks were simulated; each stands for 4" in collapsed
    assert "collapsed" not in every
    seconds = [float(re.search(r"modelled: ([\d.]+) s", text)[1]) for text in (every, collapsed)]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.01)


def test_ranks_that_cannot_be_shared_out_are_refused(trace):
    with pytest.raises(ConfigError, match="--ranks is 10; it must be a multiple of --instances"):
        large_cluster.main(["--trace", str(trace), "--ranks", "10", "--instances", "4"])
