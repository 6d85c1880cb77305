"""The report of a GPU comparison: goals, figures and bounds of every case, and its record in JSON lines."""

from __future__ import annotations

import dataclasses
import gzip
import json
from datetime import UTC, datetime
from typing import Any

from gpu_comparison.cases import Role
from gpu_comparison.data_sheets import Rates
from gpu_comparison.found import Found, Visit
from gpu_comparison.machine_rates import Machine
from gpu_comparison.record import About, Record, regime_line, result_line, run_line, visit_lines
from gpu_comparison.report import markdown, summary
from gpu_comparison.routing import Distinct
from gpu_stand_ins import FAST, OURS, SLOW, case, regime, settings

MEASURED = Rates(source="measured in this run", memory_bytes_per_s=1e6, flop_per_s=1e9, copy_in_bytes_per_s=5e9)
SHEET = Rates(source="data sheet of X", memory_bytes_per_s=2e6, flop_per_s=2e9, fp8_flop_per_s=4e12)
ABOUT = About(
    command=["python", "benchmark/gpu.py", "--cases", "kv"],
    started=datetime(2026, 1, 2, tzinfo=UTC),
    machine={"cpu": "CPU", "cores": 2, "cpu_flags": [], "memory_bytes": 1 << 30, "gpus": ["GPU, 1 MiB, 580.1"]},
    source={"commit": "0123456789abcdef", "changed_files": 0},
    label="attention backend of both: triton",
    is_tiny=False,
    rates=Machine(measured=MEASURED, sheet=SHEET),
)


def found(ours: list[float], best: list[float], **more: Any) -> Found:
    visits = [Visit(case=OURS, round=number, wall_s=wall, versions={"torch": "9"}) for number, wall in enumerate(ours)]
    visits += [Visit(case=FAST, round=number, wall_s=wall, interrupted=3) for number, wall in enumerate(best)]
    visits.append(Visit(case=SLOW, round=1, fault="failed in round 1: no memory"))
    return Found(visits=visits, **more)


def rows_of(text: str) -> dict[str, str]:
    return {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| s")}


def test_the_head_names_the_machine_and_the_result_of_every_goal():
    failed = regime(name="tight"), found([10.0], [])
    open_end = regime(name="accumulation", goals=())
    done = [(regime(), found([10.0, 10.0], [14.0, 13.0])), failed, (open_end, found([1.0], [2.0])), (open_end, Found())]
    text = summary(ABOUT, done, ["weights", "accumulation"])
    assert "2026-01-02" in text
    assert "`python benchmark/gpu.py --cases kv` at 0123456789ab; torch 9; attention backend of both: triton." in text
    assert "GPU, 1 MiB, 580.1" in text
    assert "- rates, measured in this run: device memory 0 GB/s" in text
    assert "- rates, data sheet of X: " in text
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    asked = "1.3x (times stock, median)"
    assert lines[2:] == [
        ["kv", asked, "1.35 (1.30-1.40)x", "met"],
        ["tight", asked, "", "not run: no visit of stock has ended well"],
        ["accumulation", "none", "2.00x", "a finding"],
        ["accumulation", "none", "", "not run"],
        ["weights", "3.0x (times stock, median)", "", "not run"],
        ["weights", "70% (share of the host's copy rate)", "", "not run"],
        ["accumulation", "none", "", "not run"],
    ]


def test_a_missed_goal_names_the_resource_that_bounds_ours_and_the_share_reached():
    done = found([10.0], [11.0], distinct={OURS: Distinct(mean=4.0, least=2, rows=2)})
    text = markdown(regime(), done, ABOUT)
    line = next(line for line in text.splitlines() if line.startswith("- Goal"))
    assert "measured 1.10x; missed: " in line
    assert line.endswith("of the bound by device memory.")


def test_each_case_has_its_figures_and_its_work():
    made = regime(case(OURS, Role.OURS), case(SLOW), case(FAST), case("stock, cache", lacking="not available on a CPU"))
    done = found([10.0, 12.0], [14.0, 15.0], distinct={OURS: Distinct(mean=4.0, least=2, rows=2)})
    text = markdown(made, done, ABOUT)
    figures, bounds = (rows_of(part) for part in text.split("rows a step"))
    assert list(figures) == [f"{OURS} (compared)", SLOW, f"{FAST} (best, compared)", "stock, cache"]
    assert "11.00 (10.00-12.00)" in figures[f"{OURS} (compared)"]
    assert "failed in round 1" in figures[SLOW]
    assert "not available on a CPU" in figures["stock, cache"]
    assert list(bounds) == [OURS, FAST], "those that ran"
    assert "4.0 of 8 (2 rows)" in bounds[OURS]
    assert "~2.0" in bounds[OURS], "an engine that does not say its rows"
    assert "~3.5 of 8" in bounds[FAST], "experts that were not counted"
    assert "device memory" in bounds[OURS]
    assert f"- {SLOW}: failed in round 1: no memory" in text


def test_without_a_peer_there_is_no_ratio():
    assert "- No ratio: no peer has run." in markdown(regime(), found([10.0], []), ABOUT)
    assert "- No ratio: none of ours has run." in markdown(regime(), found([], [1.0]), ABOUT)
    faulty = Found(routing_fault="no case has run")
    text = markdown(regime(), faulty, ABOUT)
    assert "- No ratio: none of ours and no peer has run." in text
    assert "- Distinct experts were not counted: no case has run." in text


def test_our_time_by_part_is_that_of_the_median_round():
    visits = [
        Visit(case=OURS, round=number, wall_s=number, part_s={"copies": number, "weights": 0}) for number in (3, 1, 2)
    ]
    text = markdown(regime(), Found(visits=visits), ABOUT)
    assert f"Seconds of {OURS} by part, as the host sees them: copies 2.0." in text


def test_a_tiny_run_marks_its_figures_as_meaningless_and_judges_no_goal():
    text = summary(dataclasses.replace(ABOUT, is_tiny=True), [(regime(), found([10.0], [20.0]))], [])
    assert "Its figures say nothing of a GPU" in text
    assert "not judged: a tiny scale" in text
    assert "says nothing of a GPU" not in summary(ABOUT, [], [])


def test_the_record_has_a_line_for_the_run_each_visit_and_each_result(tmp_path):
    record, made, done = Record(tmp_path / "results.jsonl"), regime(), found([10.0], [14.0])
    record.add("run", run_line(ABOUT))
    record.add("regime", regime_line(made, settings(tmp_path)))
    for line in visit_lines(made, done, 1):
        record.add("visit", line)
    record.add("result", result_line(made, done, ABOUT))
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["kind"] for line in lines] == ["run", "regime", "visit", "visit", "result"]
    assert lines[0]["rates"]["measured"]["copy_in_bytes_per_s"] == 5e9
    assert [line["case"] for line in lines[2:4]] == [FAST, SLOW]
    result = lines[-1]
    assert (result["ours"], result["best_peer"], result["goals"][0]["met"]) == (OURS, FAST, True)
    assert result["bounds"][OURS]["against"][0]["bound"]["resource"] == "device memory"


def test_a_trace_is_read_for_the_report(tmp_path):
    path = tmp_path / "a.trace.json.gz"
    events = [{"ph": "X", "cat": "kernel", "ts": 0, "dur": 2000, "name": "k"}]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    text = markdown(regime(), found([10.0], [14.0], traces=[path]), ABOUT)
    assert "- Profile (a.trace.json.gz): in 2.0 ms the GPU computed for 2.0 ms" in text
    assert "- No profile: no time." in markdown(regime(), found([10.0], [14.0], profile_fault="no time"), ABOUT)
