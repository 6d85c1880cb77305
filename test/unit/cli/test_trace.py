"""The trace command prints one sequence's events in order, and names what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_batch.cli.main import main

CHANGE = b'{"t": 1.5, "sequence": "a", "from": "QUEUED", "to": "FINISHED", "why": "done"}\n'


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    steps = [("QUEUED", "PREFILLING"), ("PREFILLING", "READY"), ("READY", "RUNNING"), ("RUNNING", "FINISHED")]
    lines = [
        {"t": 100.0 + i, "sequence": name, "from": before, "to": after, "why": f"why {i}"}
        for i, (before, after) in enumerate(steps)
        for name in ("aaa1", "bbb2")
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_events_of_one_sequence_come_in_order(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(trace_file), "aaa"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(" s ")[1].split("why")[0].split() for line in printed] == [
        ["QUEUED", ">", "PREFILLING"],
        ["PREFILLING", ">", "READY"],
        ["READY", ">", "RUNNING"],
        ["RUNNING", ">", "FINISHED"],
    ]


def test_without_an_id_every_sequence_is_listed_with_its_path(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(trace_file)]) == 0
    assert "bbb2  QUEUED > PREFILLING > READY > RUNNING > FINISHED" in capsys.readouterr().out


def test_decisions_are_skipped_and_replayed_on_request(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {
        "running": 3,
        "steps": 1,
        "slots": 9,
        "free_slots": 5,
        "filling": False,
        "changed": False,
        "queued_tokens": 0,
        "begun": None,
        "urgent": False,
    }
    nothing = {"rows": [], "count": 0}
    plan = {"prefill": {"b_attn": 8, "b_moe": 8}, "decode": {"b_attn": 8, "b_moe": 8}, "page_size": 16}
    more = {"boundary_tokens": 16, "refill_watermark": 0.5, "ready_target": 8}
    record = {
        "t": 1.0,
        "engine": 1.0,
        "rank": 0,
        "version": 8,
        "decision": "next",
        "policy": "device",
        "others_run": False,
        "plan": {**plan, **more},
        "state": {
            **state,
            "queued_tokens": 0,
            "begun": None,
            "returning": 0,
            "forked": 0,
            "queued": nothing,
            "ready": nothing,
        },
        "kv": {"arrived": False},
        "actions": [{"action": "Step", "prefill": [], "decode": None, "on_device": None}],
    }
    with trace_file.open("a") as file:
        file.write(json.dumps(record) + "\n")
    assert main(["trace", str(trace_file), "aaa"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert main(["trace", str(trace_file), "--replay"]) == 0
    assert capsys.readouterr().out == "1 decisions, 0 differ\n"
    with trace_file.open("a") as file:
        file.write(json.dumps({**record, "actions": [{"action": "Idle"}]}) + "\n")
    assert main(["trace", str(trace_file), "--replay"]) == 2
    assert capsys.readouterr().out.endswith("2 decisions, 1 differ\n")


def test_an_unknown_sequence_or_file_is_named(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(trace_file), "zzz"]) == 1
    assert "'zzz'; it holds 2 sequences" in capsys.readouterr().err
    assert main(["trace", str(trace_file.with_name("none")), "zzz"]) == 1
    assert "is not a file" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["--replay"], ["aaa"]])
def test_half_of_a_last_line_is_left_out_and_the_rest_is_read(
    trace_file: Path, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    whole = trace_file.read_bytes()
    assert main(["trace", str(trace_file), *argv]) == 0
    printed = capsys.readouterr().out
    trace_file.write_bytes(whole + whole[:40])
    assert main(["trace", str(trace_file), *argv]) == 0
    again = capsys.readouterr()
    assert again.out == printed
    assert "is not whole, and is left out" in again.err


def test_a_whole_last_line_is_read_without_its_line_break(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace.jsonl").write_bytes(CHANGE.rstrip())
    assert main(["trace", str(tmp_path / "trace.jsonl")]) == 0
    assert capsys.readouterr() == ("a  QUEUED > FINISHED\n", "")


def test_the_decision_about_an_arrival_is_no_change_of_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrival = {
        "t": 1.0,
        "engine": 1.0,
        "rank": 0,
        "version": 8,
        "decision": "arrival",
        "sequence": {"sequence_id": "a"},
    }
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps(arrival) + "\n")
    assert main(["trace", str(trace)]) == 1
    assert "holds no sequence" in capsys.readouterr().err
    trace.write_bytes(trace.read_bytes() + CHANGE)
    assert main(["trace", str(trace)]) == 0
    assert capsys.readouterr().out == "a  QUEUED > FINISHED\n"


@pytest.mark.parametrize("argv", [[], ["--replay"]])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (CHANGE + b'{"custom_id": "a"}\n', "line 2 of"),
        (b'{"sequence": "ACGT"}\n', "line 1 of"),
        (CHANGE.replace(b'"a"', b"7"), "line 1 of"),
        (CHANGE.replace(b"1.5", b'"late"'), "line 1 of"),
        (b'{"decision": "next"}\n', "line 1 of"),
        (b'{"decision": "next", "version": 8, "engine": {}, "rank": 0}\n', "line 1 of"),
        (b"[" * 100_000 + b"\n", "line 1 of"),
        (b"9" * 5_000 + b"\n", "line 1 of"),
        (b"\x80\xff\n", "line 1 of"),
        (b"[1]\n", "line 1 of"),
        (b"", "holds no line of a trace"),
    ],
)
def test_a_file_that_is_no_trace_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], content: bytes, words: str
) -> None:
    (tmp_path / "other").write_bytes(content)
    assert main(["trace", str(tmp_path / "other"), *argv]) == 1
    said = capsys.readouterr().err
    assert said.startswith("sgl-batch trace: error: ")
    assert words in said
    assert "--trace-file" in said
