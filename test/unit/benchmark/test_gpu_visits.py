"""The order of a GPU comparison: a sweep first, then turns while time is left; an engine that fails is reported."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from comparison.child import ChildEnd
from comparison.workload import Workload
from gpu_comparison import visits
from gpu_comparison.cases import Regime, Role
from gpu_comparison.found import Found, compared, figures_of
from gpu_comparison.routing import Distinct
from gpu_comparison.visits import Run, last_line
from gpu_stand_ins import FAST, OURS, SLOW, STORE, WORKLOAD, case, regime, settings

COUNTERS = {"suspensions": 7, "recomputed_tokens_planned": 1, "prefill_groups": 2, "decode_groups": 16}

LOG = "Retract requests. #retracted_reqs: 2\nDecode batch, #running-req: 3\nout of memory\n\n"


@dataclass
class Children:
    """Stand in for engine processes: seconds of each case, or None where it fails; they take time by the clock."""

    walls: dict[str, float | None]
    now: float = 0.0
    took_s: float = 30.0
    specs: list[dict] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    routing: dict | None = None
    routing_reason: str | None = None

    def run(self, python, spec, result, log, *, limit_s, threads, runner, environment) -> ChildEnd:
        asked = json.loads(spec.read_text(encoding="utf-8"))
        self.now += self.took_s
        self.limits.append(limit_s)
        if runner == "routing_round.py":
            self.routing = asked
            log.write_text("out of memory", encoding="utf-8")
            counted = {name: {"mean": 6.5, "least": 5, "rows": len(rows)} for name, rows in asked["outputs"].items()}
            result.write_text(json.dumps(counted), encoding="utf-8")
            return self._end(self.routing_reason)
        self.specs.append(asked)
        wall = self.walls[self._name(spec)]
        log.write_text(
            "Retract requests. #retracted_reqs: 2\nDecode batch, #running-req: 3\nout of memory\n\n", encoding="utf-8"
        )
        if wall is None:
            return self._end("RuntimeError: no memory")
        ours = asked["engine"] == "sgl_batch"
        details = {"part_s": {"attention": 1.0}, "counters": COUNTERS} if ours else {}
        done = {
            "wall_s": wall,
            "start_s": 10.0,
            "num_output_tokens": [4, 4],
            "some_outputs": [[1, 2, 3, 4], [5, 6, 7, int(wall)]],
            "distinct_tokens": 0.5,
            "warm_up_prompt_tokens": 5,
            "details_before": {"part_s": {"attention": 0.0}, "counters": {}} if ours else {},
            "details_after": details,
            "versions": {"torch": "9"},
        }
        result.write_text(json.dumps(done), encoding="utf-8")
        return self._end(None)

    def _name(self, spec: Path) -> str:
        return next(name for name in self.walls if "".join(c if c.isalnum() else "-" for c in name) in spec.name)

    def _end(self, reason: str | None) -> ChildEnd:
        return ChildEnd(reason=reason, peak_rss_bytes=1 << 30, took_s=self.took_s, cpus_of_others=0.0)


def run(monkeypatch, tmp_path, children: Children, made: Regime, **more) -> tuple[Found, list[int]]:
    monkeypatch.setattr(visits, "run_child", children.run)
    found, lengths = Found(), []
    Run(
        made,
        settings(tmp_path, **more),
        found,
        say=lambda _: None,
        changed=lambda: lengths.append(len(found.visits)),
        clock=lambda: children.now,
    ).all()
    return found, lengths


def order(found: Found) -> list[tuple[int, str]]:
    return [(visit.round, visit.case) for visit in found.visits]


def test_the_first_round_has_all_and_later_ones_ours_and_the_fastest_peer_by_turns(monkeypatch, tmp_path):
    found, lengths = run(monkeypatch, tmp_path, Children({OURS: 2.0, SLOW: 9.0, FAST: 4.0}), regime())
    assert order(found) == [(1, OURS), (1, SLOW), (1, FAST), (2, FAST), (2, OURS), (3, OURS), (3, FAST)]
    assert lengths == [1, 2, 3, 4, 5, 6, 7, 7], "each result is written at once, and the routing last"
    assert [one.name for one in compared(regime(), found) if one is not None] == [OURS, FAST]


def test_a_failed_engine_is_reported_with_the_last_line_of_its_log_and_the_run_goes_on(monkeypatch, tmp_path):
    found, _ = run(monkeypatch, tmp_path, Children({OURS: 2.0, SLOW: 9.0, FAST: None}), regime(), rounds=2)
    assert order(found) == [(1, OURS), (1, SLOW), (1, FAST), (2, SLOW), (2, OURS)]
    fault = found.fault_of(FAST)
    assert fault is not None
    assert fault.startswith("failed in round 1: RuntimeError: no memory (last line of 1-stock--larger-chunks.log: out")


def test_the_next_of_ours_is_compared_where_the_first_fails(monkeypatch, tmp_path):
    made = regime(case(STORE, Role.OURS), case(OURS, Role.OURS), case(FAST))
    found, _ = run(monkeypatch, tmp_path, Children({STORE: None, OURS: 1.0, FAST: 4.0}), made, rounds=1)
    ours, best = compared(made, found)
    assert (ours, best) == (made.cases[1], made.cases[2])


def test_the_first_of_ours_is_compared_even_if_it_is_slower(monkeypatch, tmp_path):
    made = regime(case(STORE, Role.OURS), case(OURS, Role.OURS), case(FAST))
    found, _ = run(monkeypatch, tmp_path, Children({STORE: 3.0, OURS: 1.0, FAST: 4.0}), made, rounds=1)
    assert compared(made, found)[0] is made.cases[0]


def test_a_visit_beyond_the_time_limit_is_left_out_and_reported(monkeypatch, tmp_path):
    children = Children({OURS: 2.0, SLOW: 9.0, FAST: 4.0})
    found, _ = run(monkeypatch, tmp_path, children, regime(), until_s=100.0)
    assert [number for number, _ in order(found) if number == 1] == [1, 1, 1]
    assert [visit.fault is None for visit in found.visits] == [True] * 3 + [False] * 4
    assert "10 s were left" in (found.fault_of(FAST) or "")
    assert children.limits == [100.0, 70.0, 40.0], "a visit ends with the run's time at the latest"
    assert found.routing_fault == "10 s were left (--minutes)"


def test_engines_that_a_machine_lacks_are_reported_and_not_run(monkeypatch, tmp_path):
    made = regime(case(OURS, Role.OURS), case(FAST, lacking="not available on a CPU"))
    children = Children({OURS: 2.0})
    found, _ = run(monkeypatch, tmp_path, children, made, rounds=1)
    assert len(children.specs) == 1
    assert found.fault_of(FAST) == "not available on a CPU"


def test_other_cases_of_ours_and_references_run_once_after_the_rounds(monkeypatch, tmp_path):
    made = regime(case(STORE, Role.OURS), case(OURS, Role.OURS), case(FAST), case("stock, whole", Role.REFERENCE))
    children = Children({STORE: 3.0, OURS: 1.0, FAST: 4.0, "stock, whole": 1.0})
    found, _ = run(monkeypatch, tmp_path, children, made, rounds=2)
    assert order(found) == [(1, STORE), (1, FAST), (2, FAST), (2, STORE), (1, OURS), (1, "stock, whole")]
    found, _ = run(monkeypatch, tmp_path, Children(children.walls), made, rounds=2, until_s=170.0)
    assert found.fault_of(OURS) == "not run in round 1: 50 s were left (--minutes)", "the routing has its time kept"
    assert found.distinct[STORE].mean == 6.5


def test_every_visit_samples_and_asks_for_the_experts_of_all_tokens(monkeypatch, tmp_path):
    children = Children({OURS: 2.0, SLOW: 9.0, FAST: None})
    found, _ = run(monkeypatch, tmp_path, children, regime(), rounds=1)
    assert {spec["sampling"]["temperature"] for spec in children.specs} == {1.0}
    assert children.routing is not None
    assert children.routing["outputs"] == {OURS: [[1, 2, 3, 4], [5, 6, 7, 2]], SLOW: [[1, 2, 3, 4], [5, 6, 7, 9]]}
    assert children.routing["prompts"] == WORKLOAD.prompts
    assert children.routing["rows"] == {OURS: 1, SLOW: 2}, "of those that were replayed"
    assert (children.routing["layers"], children.routing["top_k"]) == (2, 2)
    assert found.distinct == {name: Distinct(mean=6.5, least=5, rows=2) for name in (OURS, SLOW)}


def test_a_failed_routing_visit_is_reported(monkeypatch, tmp_path):
    children = Children({OURS: 2.0, SLOW: 9.0, FAST: 3.0}, routing_reason="RuntimeError: no pinned memory")
    found, _ = run(monkeypatch, tmp_path, children, regime(), rounds=1)
    assert found.distinct == {}
    assert (found.routing_fault or "").startswith("RuntimeError: no pinned memory (last line of 0-routing.log: out")


def test_ours_counts_for_itself_and_stocks_log_is_read(monkeypatch, tmp_path):
    found, _ = run(monkeypatch, tmp_path, Children({OURS: 2.0, SLOW: 9.0, FAST: 4.0}), regime(), rounds=1)
    ours, stock = found.ran(OURS)[1], found.ran(SLOW)[1]
    assert (ours.interrupted, ours.recomputed_tokens, ours.part_s) == (7, 1, {"attention": 1.0})
    assert (stock.interrupted, stock.counters) == (2, {})
    assert ours.decode_rows == (8 - 2) / 16, "a prefill gives the first token of each sequence"
    assert stock.decode_rows == 3
    assert (ours.distinct_tokens, stock.distinct_tokens) == (0.5, 0.5)


def test_tokens_that_stock_prefilled_beyond_prompts_and_warm_up_count_as_recomputed():
    log = "Prefill batch, #new-token: 10\nPrefill batch, #new-token: 9\nRetract requests. #retracted_reqs: 1\n"
    done = {"wall_s": 1.0, "start_s": 1.0, "versions": {}, "warm_up_prompt_tokens": 5, "distinct_tokens": 1.0}
    figures = figures_of({**done, "details_before": {}, "details_after": {}}, WORKLOAD, log)
    assert figures["recomputed_tokens"] == 19 - 5 - 5 - 1


def test_outputs_of_another_length_are_a_failure(monkeypatch, tmp_path):
    made = regime(workload=Workload(prompts=[[1]], output_lens=[5], description="one"))
    found, _ = run(monkeypatch, tmp_path, Children({OURS: 2.0, SLOW: 9.0, FAST: 4.0}), made, rounds=1)
    assert all("output tokens" in (visit.fault or "") for visit in found.visits)


def test_a_profile_is_an_extra_visit_that_begins_in_the_middle_and_counts_for_no_round(monkeypatch, tmp_path):
    children = Children({OURS: 2.0, SLOW: 9.0, FAST: 4.0})
    found, _ = run(monkeypatch, tmp_path, children, regime(), rounds=1, profile_steps=6)
    assert len(found.visits) == 3
    asked = children.specs[-1]["profile"]
    assert (asked["num_steps"], asked["skip_steps"]) == (6, (2 + 16) // 2)
    assert found.profile_fault == "SGLang's profiler wrote no trace"


@pytest.mark.parametrize(("text", "message"), [("a\nb\n\n", "last line of x.log: b"), ("", "x.log is empty")])
def test_the_last_line_of_a_log_is_the_last_that_is_not_empty(tmp_path, text, message):
    (tmp_path / "x.log").write_text(text, encoding="utf-8")
    assert last_line(tmp_path / "x.log") == message
