"""The text at the end of a run."""

from __future__ import annotations

import pytest

from sgl_batch.core.answers import EngineStats
from sgl_batch.file_run.run_result import Failures, RunResult, RunStatus
from sgl_batch.file_run.summary import format_summary


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


def test_the_summary_shows_lines_time_and_speed():
    text = format_summary(result())
    assert "Done: 100 of 100 lines ok, 0 failed, in 0:50 (50.0 s)" in text
    assert "10,000         200.0 per second" in text
    assert "2,500          50.0 per second" in text


def test_the_summary_names_the_forward_pass():
    summary = format_summary(result(stats=EngineStats(forward="sglang (no adapter for Phi3ForCausalLM)")))
    assert "  forward     sglang (no adapter for Phi3ForCausalLM)\n" in summary
    assert "forward" not in format_summary(result(stats=EngineStats()))


def test_the_summary_shows_the_time_by_part_longest_first():
    stats = EngineStats(part_s={"attention": 10.0, "exchange": 0.0, "weights": 0.01, "experts": 30.0})
    lines = format_summary(result(stats=stats)).splitlines()
    start = lines.index("Where the time went:")
    assert lines[start + 1].split() == ["experts", "30.00", "s", "75.0%"]
    assert lines[start + 2].split() == ["attention", "10.00", "s", "25.0%"]
    assert not any(name in format_summary(result(stats=stats)) for name in ("exchange", "weights"))


def test_the_summary_shows_tokens_per_expert_call_and_imbalance():
    stats = EngineStats(
        counters={"expert_calls": 4, "expert_rows": 1000, "expert_gemms": 8},
        tokens_per_expert=[100, 300, 50, 150],
    )
    text = format_summary(result(stats=stats))
    assert (
        "4 combined calls (one for each layer and group) of 250.0 routed tokens, 125.0 tokens for each expert" in text
    )
    assert "most loaded expert 1 (300 tokens), least loaded expert 2 (50 tokens), imbalance 2.00" in text


def test_the_summary_shows_the_share_of_prompt_tokens_shared():
    stats = EngineStats(counters={"prompt_tokens": 31_744, "prompt_tokens_shared": 19_456})
    assert (
        "Prefix sharing: 38.0% of 51,200 prompt tokens computed once for several prompts"
        in format_summary(result(stats=stats)).splitlines()
    )
    assert "Prefix sharing" not in format_summary(result(stats=EngineStats(counters={"prompt_tokens": 7})))


def test_the_summary_shows_the_use_of_the_host_store():
    counters = {"suspensions": 1200, "streamed_steps": 95, "decode_groups": 295, "decode_rows": 5900}
    assert (
        "Host KV store: 1,200 suspensions; decode streamed in 95 of 295 steps, 20.0 sequences a step"
        in format_summary(result(stats=EngineStats(counters=counters)))
    )
    assert "Host KV store" not in format_summary(result(stats=EngineStats(counters={"decode_groups": 295})))


@pytest.mark.parametrize(
    ("counters", "text"),
    [
        (
            {"sequences_overflowed": 1200, "overflow_bytes": 64 << 20},
            "1,300 suspensions, 1,200 of them to files of 64.00 MiB in /scratch (--kv-store-dir)",
        ),
        ({"sequences_overflowed": 1300}, "1,300 suspensions, 1,300 of them to host memory"),
        ({}, "1,300 suspensions, all waited on the device"),
    ],
)
def test_the_summary_says_where_sequences_waited_that_had_outgrown_their_reservations(counters, text):
    stats = EngineStats(counters={"suspensions": 1300, **counters}, overflow_directory="/scratch")
    shown = format_summary(result(stats=stats))
    assert f"Outgrown reservations (--admission): {text}" in shown.splitlines()
    assert "Host KV store" not in shown
    assert "Outgrown" not in format_summary(result(stats=EngineStats(overflow_directory="/scratch")))


def test_partitions_are_shown_with_what_their_replicas_took():
    counters = {"partitions": 3, "replicas_made": 12, "replica_bytes": 3 << 20, "replication_us": 250_000}
    text = "; 12 replicas of 3.00 MiB, made in 0.25 s of all ranks' time"
    for counts, begun in ((counters, "3"), ({**counters, "partitions_undone": 1}, "3, 1 given up")):
        shown = format_summary(result(stats=EngineStats(counters=counts)))
        assert f"Partitions over ranks: {begun}{text}" in shown.splitlines()
    assert "Partitions" not in format_summary(result(stats=EngineStats(counters={})))


def test_prompts_that_all_ranks_computed_are_shown():
    shown = format_summary(result(stats=EngineStats(counters={"prompts_partitioned": 4})))
    assert "Prompts that all ranks computed together: 4" in shown.splitlines()


def test_the_summary_shows_the_decode_steps_that_ran_as_graphs():
    counters = {"graphs_captured": 12, "graph_replays": 24_000, "graph_bytes": 3 << 29, "eager_steps": 768}
    assert (
        "CUDA graphs of decode steps: 12 captured in 1.50 GiB, 24,000 replays; 768 steps ran kernel by kernel"
        in format_summary(result(stats=EngineStats(counters=counters)))
    )
    assert "CUDA graphs" not in format_summary(result(stats=EngineStats(counters={"eager_steps": 768})))


def test_the_summary_shows_what_drafts_gave():
    counters = {
        "speculative_passes": 200,
        "decode_groups": 1000,
        "drafts": 1200,
        "drafts_accepted": 600,
        "sequences_drafted_for": 300,
    }
    assert (
        "Drafts (--speculate): in 200 of 1,000 decode passes, 600 of 1,200 right; 3.00 tokens of a sequence in each of "
        "these passes" in format_summary(result(stats=EngineStats(counters=counters))).splitlines()
    )
    assert "Drafts" not in format_summary(result(stats=EngineStats(counters={"decode_groups": 1000})))


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


def test_missing_lines_and_missing_work_are_reported():
    text = format_summary(
        result(status=RunStatus.INTERRUPTED, ok=0, failed=0, stats=EngineStats(counters={"expert_calls": 0}))
    )
    assert "Interrupted: 0 of 100 lines ok, 0 failed, 100 missing" in text
    assert "Warning: no line has an output." in text
    assert "Warning: the engine counted no expert call" in text


def rank_stats(share_of_stall: float, experts: list[int], **counters: int) -> EngineStats:
    part_s = {"experts": 10 * (1 - share_of_stall), "exchange": 0.0, "stall": 10 * share_of_stall}
    return EngineStats(counters=counters, part_s=part_s, tokens_per_expert=experts)


def test_the_summary_shows_the_work_of_each_rank():
    ranks = [
        rank_stats(0.25, [700, 50], sequences_finished=1200, output_tokens=9000, sequences_departed=3),
        rank_stats(0.5, [200, 50], sequences_finished=1300, output_tokens=8000, sequences_arrived=3),
    ]
    stats = EngineStats(part_s={"experts": 6.0}, tokens_per_expert=[700, 50, 200, 50], ranks=ranks)
    lines = format_summary(result(stats=stats)).splitlines()
    start = lines.index("By rank (waits: the time without requests, and for other ranks):")
    titles = ["finished", "tokens out", "moved in", "moved out", "routed tokens", "waits"]
    assert lines[start + 1].strip().split("  ")[0] == titles[0]
    assert [title for title in titles if title in lines[start + 1]] == titles
    assert lines[start + 2].split() == ["rank", "0", "1,200", "9,000", "0", "3", "750", "25.0%"]
    assert lines[start + 3].split() == ["rank", "1", "1,300", "8,000", "3", "0", "250", "50.0%"]
    assert len({len(line) for line in lines[start + 1 : start + 4]}) == 1, "the columns are aligned"


def test_the_summary_shows_peak_memory_and_budget():
    gib = 1 << 30
    stats = EngineStats(peak_memory_bytes=2 * gib + gib // 10, memory_budget_bytes=3 * gib)
    assert "  peak memory       2.10 GiB of 3.00 GiB allowed\n" in format_summary(result(stats=stats))
    free = EngineStats(peak_memory_bytes=gib, ranks=[EngineStats(), EngineStats()])
    assert "  peak memory       1.00 GiB (the most of 2 ranks)\n" in format_summary(result(stats=free))
    assert "peak memory" not in format_summary(result(stats=EngineStats()))


def test_tokens_that_were_computed_twice_against_the_plan_are_a_warning():
    counted = {"recomputed_tokens_planned": 7, "recomputed_tokens_unplanned": 1200}
    text = format_summary(result(stats=EngineStats(counters=counted)))
    assert "Warning: KV of 1,200 tokens was computed a second time" in text
    none = EngineStats(counters={**counted, "recomputed_tokens_unplanned": 0})
    assert "second time" not in format_summary(result(stats=none))


def test_a_lone_rank_has_no_table_of_ranks():
    assert "By rank" not in format_summary(result(stats=EngineStats(part_s={"experts": 1.0})))
