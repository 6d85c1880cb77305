"""The trace holds every change of state, one JSON line each, in order."""

from __future__ import annotations

import json
import time

import pytest

from sgl_batch.core.coroutine import Event, Transition
from sgl_batch.core.sequence import Status
from sgl_batch.errors import ConfigError
from sgl_batch.managers.trace import TraceWriter

PREFILL = Transition(
    sequence_id="a",
    before=Status.QUEUED,
    after=Status.PREFILLING,
    event=Event.COMBINE_PREFILL,
    why="group of 1",
)
YIELD = Transition(
    sequence_id="a",
    before=Status.PREFILLING,
    after=Status.READY,
    event=Event.YIELD_PREFILLED,
    why='KV is "kept"\n',
)


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_transition_is_one_line_with_time_sequence_states_and_reason(tmp_path):
    path, begun = tmp_path / "trace.jsonl", time.time()
    TraceWriter(str(path)).write([PREFILL, YIELD])
    first, second = lines(path)
    assert begun - 1e-6 <= first["t"] <= time.time() + 1e-6
    assert {**first, "t": 0} == {
        "t": 0,
        "sequence": "a",
        "from": "QUEUED",
        "to": "PREFILLING",
        "why": "group of 1",
    }
    assert (second["from"], second["to"], second["why"]) == ("PREFILLING", "READY", 'KV is "kept"\n')


def test_lines_can_be_read_during_the_run(tmp_path):
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(str(path))
    for count in (1, 2, 3):
        writer.write(change for change in [PREFILL])
        assert len(lines(path)) == count


def test_a_second_run_appends(tmp_path):
    path = tmp_path / "trace.jsonl"
    for change in (PREFILL, YIELD):
        TraceWriter(str(path)).write([change])
    assert [line["to"] for line in lines(path)] == ["PREFILLING", "READY"]


def test_without_a_file_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    TraceWriter(None).write([PREFILL])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", ".", "absent/trace.jsonl"])
def test_a_file_that_cannot_be_written_is_the_users_fault_with_a_remedy(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be written .* name a file in a directory that exists"):
        TraceWriter(name)
