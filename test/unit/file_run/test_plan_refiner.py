"""When a run looks for a better plan, for which requests, and what becomes of the decision."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from sgl_batch.core.answers import EngineStats
from sgl_batch.errors import ConfigError
from sgl_batch.file_run import plan_refiner
from sgl_batch.file_run.plan_refiner import PlanRefiner, RunProgress, measured_passes, workload_left
from sgl_batch.planner.workload import parse_workload

LENGTHS = parse_workload("50:10x40")
PLANNED = parse_workload("70:90x2000")


class Decision:
    """A decision of the planner that a test makes up."""

    def __init__(self, changes: dict[str, Any], line: str = "refined: a -> b", basis: Any = None) -> None:
        self.changes, self.line, self.why, self.basis = changes, line, "because", basis

    def as_dict(self) -> dict[str, Any]:
        return {"changes": self.changes}


class Basis:
    workload = PLANNED


def stats(seconds: float, *, idle: float = 0.0, paused: bool = False, running: int = 8) -> EngineStats:
    """Counters after so many seconds of work: two steps of eight rows in each."""
    return EngineStats(
        counters={
            "decode_groups": 2 * seconds,
            "decode_rows": 16 * seconds,
            "decode_kv_tokens": 1600 * seconds,
            "prefill_groups": seconds / 10,
            "prefill_rows": 100 * seconds,
        },
        part_s={"attention": 0.2 * seconds, "experts": 0.5 * seconds, "other": 0.3 * seconds, "idle": idle},
        sequences={"RUNNING": running, "QUEUED": 500},
        paused=paused,
    )


class Run:
    """A run that looks at readings one after the other. `asked`: what the engine was told to change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, decision: Any, *, basis: Any = Basis, **more: Any) -> None:
        self.asked: list[Any] = []
        self.notes: list[str] = []
        self.workloads: list[Any] = []
        self.refused = ""
        self._decision = decision
        monkeypatch.setattr(plan_refiner, "refine", self._refine)
        settings = {"after_s": 60.0, "least_left": 100, **more}
        self.refiner = PlanRefiner(basis, "no profile", self._change, self.notes.append, **settings)

    def _refine(self, basis: Any, measured: Any, left: Any, clock: Any) -> Any:
        self.workloads.append(left)
        if isinstance(self._decision, Exception):
            raise self._decision
        return self._decision

    async def _change(self, changes: Any, why: str) -> None:
        if self.refused:
            raise ConfigError(self.refused)
        self.asked.append((changes, why))

    def sees(self, *readings: EngineStats, left: int = 1000) -> None:
        async def look() -> None:
            for reading in readings:
                self.refiner.observe(reading, RunProgress(left=left, answered=40, lengths=LENGTHS))
                while self.refiner._deciding is not None:
                    await asyncio.sleep(0.001)

        asyncio.run(look())


def test_a_decision_comes_after_so_many_seconds_of_work_and_the_next_after_twice_as_many(monkeypatch):
    run = Run(monkeypatch, Decision({"b_moe_decode": 9}, basis=Basis))
    run.sees(stats(5), stats(40, idle=500), stats(64, idle=500))
    assert run.asked == []
    run.sees(stats(66, idle=500))
    assert run.asked == [({"b_moe_decode": 9}, "because")]
    assert run.notes == ["plan refined: a -> b"]
    run.sees(stats(70), stats(180))
    assert len(run.asked) == 1
    run.sees(stats(191))
    assert len(run.asked) == len(run.refiner.records) == 2


@pytest.mark.parametrize(("after_s", "left"), [(0.0, 1000), (60.0, 99)])
def test_a_run_that_is_almost_done_and_one_that_wants_no_refinement_keep_their_plan(monkeypatch, after_s, left):
    run = Run(monkeypatch, Decision({"b_moe_decode": 9}), after_s=after_s)
    run.sees(stats(5), stats(200), stats(400), left=left)
    assert (run.workloads, run.asked, run.notes) == ([], [], [])


def test_nothing_is_measured_over_a_pause(monkeypatch):
    run = Run(monkeypatch, Decision({"b_moe_decode": 9}, basis=Basis))
    run.sees(stats(5), stats(50, paused=True), stats(51), stats(100))
    assert run.asked == []


def test_a_plan_that_stays_is_recorded_and_nothing_is_asked_of_the_engine(monkeypatch):
    run = Run(monkeypatch, Decision({}, line="kept: no other is faster", basis=Basis))
    run.sees(stats(5), stats(100))
    assert run.asked == []
    assert run.refiner.records == [{"measured_s": 95.0, "changes": {}, "line": "kept: no other is faster"}]


def test_without_a_profile_the_user_is_told_once_and_the_plan_stays(monkeypatch):
    run = Run(monkeypatch, None, basis=None)
    run.sees(stats(5), stats(100), stats(400), stats(900))
    assert run.notes == ["plan: not refined, because nothing predicts another (no profile)"]
    assert run.workloads == []


@pytest.mark.parametrize("what", ["refused", "fails"])
def test_neither_a_refusal_nor_a_fault_of_planning_ends_the_run(monkeypatch, what):
    run = Run(monkeypatch, ZeroDivisionError("by zero") if what == "fails" else Decision({"b_moe_decode": 9}))
    run.refused = "b_moe_decode is 9, which is odd"
    run.sees(stats(5), stats(100))
    (record,) = run.refiner.records
    assert record["changes"] == {}
    assert ("ZeroDivisionError: by zero" if what == "fails" else "b_moe_decode is 9, which is odd") in record["line"]


def test_measured_passes_are_the_counters_with_all_other_time_as_steps():
    found = measured_passes(stats(100, idle=7), LENGTHS)
    assert (found.steps, found.rows, found.looked_at, found.groups) == (200, 1600, 160_000, 10)
    assert (found.tokens, found.prompt) == (10_000, 50)
    assert found.seconds == pytest.approx(100)
    assert found.part_s["step"] == pytest.approx(30)


def test_requests_that_are_left_are_as_long_as_the_answered_ones_once_these_are_most_of_those_begun():
    progress = RunProgress(left=300, answered=20, lengths=LENGTHS)
    left = workload_left(progress, stats(9, running=40), PLANNED)
    assert (left.requests, left.count) == (LENGTHS.requests, 600), "two choices for each line"
    early = workload_left(progress, stats(9, running=41), PLANNED)
    assert (early.requests, early.count) == (PLANNED.requests, 300)
    assert workload_left(replace(progress, lengths=None), stats(9), PLANNED).requests == PLANNED.requests
