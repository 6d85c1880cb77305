"""The benchmark of published workloads names the groups that it has, and simulates none that it has not."""

from __future__ import annotations

import sys

import published_workloads
import pytest


@pytest.mark.parametrize("only", ["W9", "W1,W9", "W1 W2"])
def test_an_unknown_group_is_refused_with_those_that_there_are(monkeypatch, capsys, only):
    monkeypatch.setattr(sys, "argv", ["published_workloads.py", "--only", only])
    with pytest.raises(SystemExit) as end:
        published_workloads.main()
    assert end.value.code == 2
    assert f"--only is {only}; there are W1, W2, W3, W4, W5" in capsys.readouterr().err


def test_groups_may_have_spaces_between_them(monkeypatch, capsys, tmp_path):
    simulated = []
    monkeypatch.setattr(published_workloads, "simulated", lambda case, *_, **__: simulated.append(case.group) or [])
    argv = ["published_workloads.py", "--only", "w5, W3", "--record", str(tmp_path / "record.json")]
    monkeypatch.setattr(sys, "argv", argv)
    assert published_workloads.main() == 0
    assert set(simulated) == {"W3", "W5"}
