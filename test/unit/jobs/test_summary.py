"""The text at the end of a run."""

from __future__ import annotations

from sgl_batch.core.answers import EngineStats
from sgl_batch.jobs.run_result import Failures, RunResult, RunStatus
from sgl_batch.jobs.summary import format_summary


def result(**changes):
    values = {
        "status": RunStatus.COMPLETED,
        "message": None,
        "total": 100,
        "ok": 100,
        "failed": 0,
        "wall_s": 50.0,
        "tokens_in": 10_000,
        "tokens_out": 2_500,
    }
    return RunResult(**(values | changes))


def test_it_says_lines_time_and_speed():
    text = format_summary(result())
    assert "Done: 100 of 100 lines ok, 0 failed, in 0:50 (50.0 s)" in text
    assert "10,000         200.0 per second" in text
    assert "2,500          50.0 per second" in text


def test_it_says_where_the_time_went_the_longest_first():
    stats = EngineStats(part_s={"attention": 10.0, "experts": 30.0})
    lines = format_summary(result(stats=stats)).splitlines()
    start = lines.index("Where the time went:")
    assert lines[start + 1].split() == ["experts", "30.00", "s", "75.0%"]
    assert lines[start + 2].split() == ["attention", "10.00", "s", "25.0%"]


def test_it_says_tokens_per_expert_call_and_imbalance():
    stats = EngineStats(
        counters={"expert_calls": 4, "expert_rows": 1000, "expert_gemms": 8},
        tokens_per_expert=[100, 300, 50, 150],
    )
    text = format_summary(result(stats=stats))
    assert (
        "4 combined calls (one for each layer and group) of 250.0 routed tokens, 125.0 tokens for each expert" in text
    )
    assert "most loaded expert 1 (300 tokens), least loaded expert 2 (50 tokens), imbalance 2.00" in text


def test_failures_are_grouped_by_code_with_their_first_line():
    failures = Failures()
    for line in range(7, 12):
        failures.add("missing_body", line, "no body")
    failures.add("invalid_n", 3, "n is 0")
    text = format_summary(result(ok=94, failed=6, failures=failures.by_code))
    assert "5  missing_body  (first: line 7: no body)" in text
    assert text.index("missing_body") < text.index("invalid_n")


def test_the_number_of_failure_codes_is_bounded():
    failures = Failures()
    for line in range(1000):
        failures.add(f"code_{line}", line, "message")
    assert len(failures.by_code) == 101
    assert sum(kind.count for kind in failures.by_code.values()) == 1000
    text = format_summary(result(ok=0, total=1000, failed=1000, failures=failures.by_code))
    assert "with 93 other codes" in text


def test_missing_lines_and_work_that_was_not_done_are_said():
    text = format_summary(
        result(status=RunStatus.INTERRUPTED, ok=0, failed=0, stats=EngineStats(counters={"expert_calls": 0}))
    )
    assert "Interrupted: 0 of 100 lines ok, 0 failed, 100 missing" in text
    assert "Warning: no line has an output." in text
    assert "Warning: the engine counted no expert call" in text
