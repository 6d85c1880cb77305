"""AIConfigurator beside the simulator: cases have its names, modules are the same on both sides, ratios are ours by
theirs. The package is not needed."""

from __future__ import annotations

from importlib.util import find_spec

import aiconfigurator_beside
import pytest
from beside import asked, cases, figures, ours, report
from beside.cases import EXPERT, SLICED, TENSOR, Case, Pass
from beside.figures import ATTENTION, BOTH, EXCHANGE, EXPERTS, REST, Compared

from sgl_batch.simulator.cluster.hardware import cluster_named
from sgl_batch.simulator.cluster.models import model_named


def case_of(layout: str, engine: str = "sglang") -> Case:
    return Case(model="deepseek-r1", gpu="h200", gpus=16, engine=engine, layout=layout)


def compared(theirs: float, ours_s: float, *, tables: float | None = None, layout: str = EXPERT) -> Compared:
    return Compared(
        case=case_of(layout),
        work=Pass(prompt=1024, output=1024, phase="decode", count=16, length=1536),
        theirs={ATTENTION: theirs},
        even={},
        ours={ATTENTION: ours_s if tables is None else tables},
        roofline={ATTENTION: ours_s},
        measured=1.0,
    )


@pytest.mark.parametrize(
    ("layout", "sizes", "settings", "tensor"),
    [
        (EXPERT, (1, 16, 1, 16), "sglang", False),
        (TENSOR, (16, 1, 16, 1), "sglang", True),
        (SLICED, (1, 16, 16, 1), "sglang-sliced", False),
    ],
)
def test_a_layout_has_the_same_ranks_under_both_names(
    layout: str, sizes: tuple[int, ...], settings: str, tensor: bool
) -> None:
    case = case_of(layout)
    assert tuple(case.parallel.values()) == sizes
    assert case.parallel["tp_size"] * case.parallel["attention_dp_size"] == case.ranks.ranks == 16
    assert (case.settings, case.ranks.tensor) == (settings, tensor)


def test_every_case_is_one_that_the_simulator_knows() -> None:
    found = list(cases.cases())
    assert len(found) == len(set(found)) == len(cases.MODELS) * len(cases.SYSTEMS) * len(cases.GPUS) * 5
    assert {model_named(one.model).name for one in found} == set(cases.MODELS)
    assert {cluster_named(one.cluster).gpus for one in found} == set(cases.GPUS)


def test_passes_have_no_more_sequences_than_fit_and_tensor_parallel_ranks_share_them() -> None:
    short = [one for one in cases.passes(case_of(EXPERT), 100_000) if one.phase == "decode"]
    assert all(one.count * (one.prompt + one.output) <= 100_000 for one in short)
    shared = list(cases.passes(case_of(TENSOR), 10**9))
    assert {one.count for one in shared if one.phase == "decode"} == {16 * 16, 128 * 16}
    assert {one.count for one in shared if one.prompt == 12288 and one.phase == "prefill"} == {16}


def test_modules_of_both_have_the_same_names_and_lose_no_seconds() -> None:
    operations = {"context_mla_block": 5.0, "context_moe_pre_dispatch": 2.0, "context_moe": 3.0, "context_embedding": 1}
    theirs = figures.their_modules(operations)
    assert theirs == pytest.approx({ATTENTION: 5e-3, EXCHANGE: 2e-3, EXPERTS: 3e-3, REST: 1e-3})
    work = Pass(prompt=1024, output=1024, phase="prefill", count=4, length=1024)
    seconds = ours.seconds_of(ours.deployment_of(case_of(EXPERT), tables=False), work)
    mine = figures.our_modules(seconds, like=theirs)
    assert set(mine) == set(theirs)
    assert sum(mine.values()) == pytest.approx(sum(seconds.values()))


def test_modules_that_are_given_together_there_are_added_up_here() -> None:
    theirs = figures.their_modules({"generation_moe_overlap": 7.0, "generation_tp_allreduce": 1.0})
    assert theirs == pytest.approx({BOTH: 8e-3})
    mine = figures.our_modules({"experts": 1.0, "skew": 1.0, "exchange": 2.0, "step": 3.0}, like=theirs)
    assert mine == {BOTH: 4.0, REST: 3.0}


def test_a_ratio_is_ours_by_theirs_with_its_median_and_range() -> None:
    found = [compared(1.0, 2.0), compared(1.0, 4.0, tables=1.5), compared(2.0, 2.0)]
    row = figures.ratio_table(found, ["layout"]).splitlines()[-1]
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "expert, decode",
        "3",
        "1.50 (1.50-1.50)",
        "2.00 (1.00-4.00)",
        "-",
    ]


def test_a_module_without_seconds_has_no_ratio() -> None:
    assert figures.ratio({ATTENTION: 1.0}, {EXCHANGE: 1.0}, EXCHANGE) is None
    assert figures.ratio({ATTENTION: 1.0}, {}) is None


def test_coverage_counts_cases_and_says_why_others_are_not() -> None:
    found = [
        report.Coverage(case=case_of(EXPERT), lacks=asked.reason_of("no data at /some/where of this\nmore")),
        report.Coverage(case=case_of(TENSOR), ours_lacks="too large"),
    ]
    assert "1 of 2" in report.coverage_table(found)
    assert report.reasons(found) == ["1 x deepseek-r1 on h200: no data of this", "1 x not compared: too large"]


@pytest.mark.skipif(find_spec(asked.PACKAGE) is not None, reason="the package is installed")
def test_without_the_package_one_line_says_how_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    code = aiconfigurator_beside.exit_code("beside", lambda: aiconfigurator_beside.main([]))
    printed = capsys.readouterr().err.strip()
    assert code == 1
    assert len(printed.splitlines()) == 1
    assert "pip install '.[aic]'" in printed
