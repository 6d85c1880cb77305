"""The record of the long tail is added to, and its report has medians, idle ranks, verdicts, and what differs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from comparison.workload import Workload
from long_tail.bars import Rates
from long_tail.cases import Case
from long_tail.record import Record, read_record
from long_tail.report import text
from long_tail.runs import RankRun, Run, by_round, rank_runs, tokens_a_pass

from sgl_batch.errors import ConfigError

SETTINGS = {"model": "m", "many": 416}


def rank(idle=0.25, samples=((0.5, 0.2), (1.0, 0.3)), **counters):
    return RankRun(cores=[0], idle=idle, part_s={"idle": idle}, counters=counters, samples=list(samples))


def run(number, case, seconds, *ranks, outputs=("x", "y")):
    return Run(
        round=number,
        case=case,
        seconds=seconds,
        engine_s=[seconds],
        took_s=seconds + 5,
        ranks=list(ranks) or [rank(), rank(0.5)],
        moves=3,
        outputs=list(outputs),
        cpus_of_others=0.1,
    )


@pytest.fixture
def record():
    made = Record(settings=SETTINGS, rates=[Rates(round=1, read=(1e10, 1.5e10), products=(1e11, 2e11))])
    for number, seconds in enumerate((10.0, 12.0, 11.0), 1):
        made.runs += [run(number, "a separate", 10.0), run(number, "a all", seconds)]
    return made


@pytest.fixture
def cases():
    work = Workload(prompts=[[1], [1]], output_lens=[2, 3], description="two sequences")
    return [Case(name=name, work=work, options={}) for name in ("a separate", "a all", "c one rank")]


def cells(report, begin):
    line = next(line for line in report.splitlines() if line.startswith(f"| {begin} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_report_has_medians_ratios_and_idle_ranks(record, cases):
    report = text(record, cases)
    row = "3", "11.00 (10.00-12.00)", "1.10 (1.00-1.20)", "25%, 50%", "3", "0", "1.00"
    assert cells(report, "a all")[1:] == list(row)
    assert "- a: two sequences" in report
    assert "| c one rank" not in report, "a case without runs has no row"


def test_the_report_has_a_verdict_for_each_bar_that_was_measured(record, cases):
    report = text(record, cases)
    assert cells(report, "a: all, over separate")[1:] == [
        "at most 1.10", "1.10 (1.00-1.20)", "met", "separate engines", "1.00", "91%",
    ]  # fmt: skip
    assert cells(report, "d: one rank, over partition")[2:5] == ["", "not measured", "products"]
    assert "10.00 GB/s by the cores of one rank alone, 15.00 by all: 1.50 x." in report


def test_tokens_that_differ_between_cases_are_marked_in_capitals(record, cases):
    assert "a: the same tokens in all cases and rounds." in text(record, cases)
    record.runs.append(run(4, "a all", 9.0, outputs=("x", "z")))
    assert "a: 2 DIFFERENT sets of tokens" in text(record, cases)


def test_a_record_is_read_back_as_it_was_written(record, tmp_path):
    path = tmp_path / "record.json"
    assert read_record(path, SETTINGS).last_round == 0
    record.write(path)
    again = read_record(path, SETTINGS)
    assert again == record
    assert again.last_round == 3
    assert by_round(again.runs)["a all"] == {1: 10.0, 2: 12.0, 3: 11.0}
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_rounds_with_other_settings_are_not_added_to_a_record(record, tmp_path):
    record.write(tmp_path / "record.json")
    with pytest.raises(ConfigError, match=r"was measured with many 416, and now it is 100; .*--out"):
        read_record(tmp_path / "record.json", {**SETTINGS, "many": 100})


def test_tokens_a_pass_count_right_drafts_and_not_the_rows_of_drafts():
    drafted = run(1, "c drafts", 1.0, rank(decode_rows=160.0, drafts=60.0, drafts_accepted=50.0))
    assert drafted.tokens_a_pass == 1.5
    assert tokens_a_pass([drafted, replace(drafted, ranks=[rank(decode_rows=9.0)])]) == {"c drafts": 1.25}


def test_ranks_are_read_from_the_result_of_their_process():
    stats = {"part_s": {"attention": 3.0, "idle": 1.0}, "counters": {"partitions": 2}}
    found = {"ranks": [stats, {"part_s": {"idle": 1.0}}], "cores": [[0]], "waiting": [[0.5, [0.1, 0.9]]]}
    first, second = rank_runs(json.loads(json.dumps(found)))
    assert (first.idle, first.samples, first.cores, first.counters) == (0.25, [(0.5, 0.1)], [0], {"partitions": 2})
    assert (second.idle, second.samples, second.cores) == (1.0, [(0.5, 0.9)], [])
