"""The report of a comparison: its tables, its record, and that no engine is dropped."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from comparison.machine import describe
from comparison.report import Record, as_json, markdown, phase_counts, table
from comparison.rounds import EngineRun, RoundResult, Settings
from comparison.workload import random_workload

MACHINE = {"cpu": "Some CPU", "cores": 2, "cpu_flags": ["avx2", "avx512f"], "memory_bytes": 24 * 2**30, "gpus": []}


def finished(number, wall_s, *, tokens=(1, 2), before=None, after=None):
    return RoundResult(
        number=number,
        start_s=20.0,
        warm_up_s=1.0,
        wall_s=wall_s,
        peak_rss_bytes=3 * 2**30,
        load_average=0.5,
        cpus_of_others=0.25,
        cpu_s=3.5,
        outputs=[list(tokens)],
        details_before=before or {},
        details_after=after or {},
        versions={"python": "3", "zentorch": "2.13"},
    )


def stats(attention_s, experts_s, rows, gemms):
    return {
        "part_s": {"attention": attention_s, "experts": experts_s},
        "counters": {"expert_rows": rows, "expert_gemms": gemms},
    }


@pytest.fixture
def record(tmp_path):
    ours = [
        finished(1, 2.0, before=stats(1.0, 1.0, 10, 10), after=stats(1.5, 2.25, 110, 30)),
        finished(2, 4.0, before=stats(1.0, 1.0, 10, 10), after=stats(1.5, 2.25, 110, 30)),
    ]
    runs = [
        EngineRun(name="sgl_batch", rounds=ours),
        EngineRun(
            name="stock", rounds=[finished(1, 10.0, tokens=(1, 3))], fault="failed in round 2: timed out after 9 s"
        ),
        EngineRun(name="vllm", fault="not installed (no module vllm)"),
    ]
    settings = Settings(
        model=Path("some-model"),
        dtype="bfloat16",
        rounds=2,
        timeout_s=9.0,
        hf_batch=32,
        full_warm_up=False,
        sampling={},
        threads=None,
        python_of={},
        arguments_of={},
        out=tmp_path,
    )
    return Record(
        workload=random_workload(num_prompts=1, input_len=18, spread=0, output_len=2, vocabulary=3072, seed=0),
        settings=settings,
        runs=runs,
        machine=MACHINE,
        source={"commit": "0123456789abcdef", "changed_files": 0},
        command=["python", "benchmark/offline.py", "--model", "some model"],
        started=datetime(2026, 1, 2, tzinfo=UTC),
    )


def row_of(text, first_cell):
    """The cells of the first table row that starts with `first_cell`."""
    row = next(line for line in text.splitlines() if line.startswith(f"| {first_cell} "))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_a_table_aligns_its_columns():
    text = table(["a", "long heading"], [["name", "1"]])
    assert text.splitlines() == ["| a    | long heading |", "| ---- | -----------: |", "| name |            1 |"]


def test_an_engine_row_gives_median_range_speed_and_memory(record):
    cells = row_of(markdown(record), "sgl_batch")
    assert cells[1:7] == ["3.0 (2.0-4.0)", "8 (5-10)", "0.8 (0.5-1.0)", "3.0", "20", "reference"]


def test_sampled_tokens_are_not_compared_and_the_report_says_by_what_they_were_sampled(record):
    assert "some-model, bfloat16; greedy; rounds: 2" in markdown(record)
    settings = replace(record.settings, sampling={"temperature": 0.7, "top_k": 20})
    text = markdown(replace(record, settings=settings))
    assert "some-model, bfloat16; sampled at temperature 0.7, top_k 20; rounds: 2" in text
    assert [row_of(text, name)[6] for name in ("sgl_batch", "stock")] == ["", ""]


def test_an_engine_that_failed_keeps_its_rounds_and_its_reason(record):
    text = markdown(record)
    assert row_of(text, "stock")[1:] == ["10.0", "2", "0.2", "3.0", "20", "0/1 (50 %)", "failed in round 2"]
    assert "- stock: failed in round 2: timed out after 9 s" in text


def test_an_engine_that_is_not_installed_is_listed(record):
    assert row_of(markdown(record), "vllm")[-1] == "not installed (no module vllm)"


def test_the_limits_of_groups_stand_with_where_they_are_from(record):
    assert "Plans:" not in markdown(record)
    limits = {"prefill": {"b_attn": 2048, "b_moe": 8192}, "decode": {"b_attn": 64, "b_moe": 256}}
    planned = stats(1.5, 2.25, 110, 30) | {"plan": limits, "planned": "by a profile of this machine"}
    record.runs[0] = EngineRun(name="sgl_batch", rounds=[finished(1, 2.0, before=planned, after=planned)])
    line = (
        "groups of 8,192 prompt tokens and of 256 sequences, sub-batches of 2,048 and 64; by a profile of this machine"
    )
    assert f"Plans:\n\n- sgl_batch: {line}\n" in markdown(record)


def test_rounds_that_others_disturbed_are_named(record):
    assert "WARNING: other programs took more than 0.2 cores from sgl_batch in round 1 (0.2 cores)" in markdown(record)
    quiet = [replace(done, cpus_of_others=0.2) for done in record.runs[0].rounds]
    record.runs[:] = [EngineRun(name="sgl_batch", rounds=[*quiet, replace(quiet[0], cpus_of_others=None)])]
    assert "WARNING" not in markdown(record)


def test_the_versions_of_each_engine_that_ran_are_told(record):
    versions = markdown(record).split("Versions:")[1]
    assert "- stock: python 3, zentorch 2.13" in versions
    assert "vllm" not in versions


def test_an_interrupted_engine_reports_its_finished_rounds(record):
    record.runs.append(EngineRun(name="hf"))
    assert row_of(markdown(record), "hf")[-1] == "interrupted after 0 of 2 rounds"


def test_a_ratio_above_one_means_that_the_row_is_faster(record):
    section = markdown(record).split("Times as fast as")[1]
    assert row_of(section, "sgl_batch")[1:] == ["", "5.00"]
    assert row_of(section, "stock")[1:] == ["0.20", ""]


def test_parts_and_rows_count_only_the_timed_region(record):
    found = phase_counts(record.runs[0].rounds[0])
    assert found["part_s"] == {"attention": 0.5, "experts": 1.25}
    assert found["mean_rows_per_expert_gemm"] == 5.0
    assert phase_counts(record.runs[1].rounds[0]) == {}


def test_the_record_is_json_with_raw_times_command_and_machine(record):
    found = json.loads(json.dumps(as_json(record)))
    assert [done["wall_s"] for done in found["engines"]["sgl_batch"]] == [2.0, 4.0]
    assert found["summaries"]["sgl_batch"]["times_as_fast_as"]["stock"]["median"] == 5.0
    assert found["summaries"]["vllm"]["fault"] == "not installed (no module vllm)"
    assert found["command"][-1] == "some model"
    assert found["machine"] == MACHINE


def test_the_machine_line_names_missing_vector_units():
    assert describe(MACHINE) == "Some CPU, 2 cores; avx2 avx512f; no AMX; 24 GiB of memory"
