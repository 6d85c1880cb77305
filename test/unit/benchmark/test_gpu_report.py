"""The report of a GPU comparison: the ratio by round, which bars are reached, and the share of the copies' bound."""

from __future__ import annotations

import dataclasses
import gzip
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from gpu_comparison.cases import Role
from gpu_comparison.report import About, as_json, bound_share, markdown, verdicts
from gpu_comparison.shapes import tiny
from gpu_comparison.visits import Found, Visit
from gpu_stand_ins import FAST, OURS, SLOW, case, regime, settings

ABOUT = About(
    command=["python", "benchmark/gpu.py", "kv"],
    started=datetime(2026, 1, 2, tzinfo=UTC),
    machine={"cpu": "CPU", "cores": 2, "cpu_flags": [], "memory_bytes": 1 << 30, "gpus": ["GPU, 1 MiB"]},
    source={"commit": "0123456789abcdef", "changed_files": 0},
    label="attention backend of both: triton",
    is_tiny=False,
)


def found(ours: list[float], best: list[float], **more) -> Found:
    visits = [Visit(case=OURS, round=number, wall_s=wall, versions={"torch": "9"}) for number, wall in enumerate(ours)]
    visits += [Visit(case=FAST, round=number, wall_s=wall, interrupted=3) for number, wall in enumerate(best)]
    visits.append(Visit(case=SLOW, round=1, fault="failed in round 1: no memory"))
    return Found(visits=visits, **more)


def test_a_ratio_is_paired_by_round_and_held_against_the_bar_and_the_floor():
    lines = verdicts(regime(), found([10.0, 10.0], [14.0, 13.0]))
    assert lines[0] == f"{OURS} is 1.35 (1.30-1.40) times as fast as {FAST}."
    assert lines[1:] == ["Bar of 1.3 times: reached.", "Never below 1.0 times, in any round: reached."]


def test_one_slow_round_breaks_the_floor_and_a_low_median_the_bar():
    lines = verdicts(regime(), found([10.0, 10.0, 10.0], [14.0, 12.0, 9.0]))
    assert lines[1:] == ["Bar of 1.3 times: NOT reached.", "Never below 1.0 times, in any round: NOT reached."]


def test_without_a_peer_there_is_no_ratio():
    assert verdicts(regime(), found([10.0], [])) == ["No ratio: no peer has run."]
    assert verdicts(regime(), found([], [1.0])) == ["No ratio: none of ours has run."]


def test_the_share_of_the_bound_is_the_time_of_needed_experts_at_the_measured_rate():
    made = regime(bound_bar=0.7)
    rate = {"what": "pinned", "bytes_per_s": 1e6, "low": 9e5, "high": 1.1e6}
    needed = 3_000_000 // tiny(2).expert_bytes
    visit = Visit(case=OURS, round=1, wall_s=4.0, counters={"weights_routed": needed, "weights_bytes_read": 2_000_000})
    whole = Found(visits=[visit], copy_rate=rate)
    share = bound_share(made, whole)
    assert share is not None
    assert share.median == pytest.approx(needed * tiny(2).expert_bytes / 1e6 / 4.0)
    assert share.median == pytest.approx(0.75, abs=0.02)
    assert verdicts(made, whole)[-1].endswith("bar of 70 %: reached.")
    failed = Found(visits=[visit], copy_rate={"fault": "no memory"})
    assert verdicts(made, failed)[-1] == "No bound: the host's copy rate could not be measured (no memory)."


def test_the_report_says_where_it_was_made_and_has_a_row_for_each_case():
    made = regime(case(OURS, Role.OURS), case(SLOW), case(FAST), case("stock, cache", lacking="not available on a CPU"))
    text = markdown(made, found([10.0, 12.0], [14.0, 15.0]), settings(Path()), ABOUT)
    assert "2026-01-02, 0123456789ab: `python benchmark/gpu.py kv`; torch 9." in text
    assert "attention backend of both: triton" in text
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| s")}
    assert list(rows) == [f"{OURS} (compared)", SLOW, f"{FAST} (best, compared)", "stock, cache"]
    assert "11.00 (10.00-12.00)" in rows[f"{OURS} (compared)"]
    assert "failed in round 1" in rows[SLOW]
    assert "not available on a CPU" in rows["stock, cache"]
    assert f"- {SLOW}: failed in round 1: no memory" in text
    assert "says nothing" not in text


def test_where_our_time_goes_is_told_of_the_round_of_median_time():
    visits = [
        Visit(case=OURS, round=number, wall_s=number, part_s={"copies": number, "weights": 0}) for number in (3, 1, 2)
    ]
    text = markdown(regime(), Found(visits=visits), settings(Path()), ABOUT)
    assert f"Seconds of {OURS} by part, as the host sees them: copies 2.0." in text


def test_a_tiny_run_says_that_its_figures_mean_nothing():
    text = markdown(regime(), Found(), settings(Path()), dataclasses.replace(ABOUT, is_tiny=True))
    assert "Its figures say nothing of a GPU" in text
    assert "No ratio: none of ours and no peer has run." in text


def test_the_record_is_json_and_has_every_visit(tmp_path):
    record = json.loads(json.dumps(as_json(regime(), found([10.0], [14.0]), settings(tmp_path), ABOUT)))
    assert [visit["case"] for visit in record["visits"]] == [OURS, FAST, SLOW]
    assert record["times_as_fast"]["median"] == pytest.approx(1.4)
    assert record["compared"] == {"ours": OURS, "best_peer": FAST}


def test_a_trace_is_read_for_the_report(tmp_path):
    path = tmp_path / "a.trace.json.gz"
    events = [{"ph": "X", "cat": "kernel", "ts": 0, "dur": 2000, "name": "k"}]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    lines = verdicts(regime(), found([10.0], [14.0], traces=[path]))
    assert lines[-1].startswith("Profile (a.trace.json.gz): in 2.0 ms the GPU computed for 2.0 ms")
    lines = verdicts(regime(), found([10.0], [14.0], profile_fault="no time"))
    assert lines[-1] == "No profile: no time."
