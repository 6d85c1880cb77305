"""Changes of a rank's plan: when they come into force, and that their records replay."""

from __future__ import annotations

import json

from sgl_batch.config import from_mapping
from sgl_batch.core.plan_change import PlanChange
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.core.replay import replay_trace
from sgl_batch.managers.plan_changes import PlanChanges
from sgl_batch.managers.trace import TraceWriter
from sgl_batch.metrics.counters import Counters


class Rank:
    def __init__(self, path) -> None:
        self.path = path
        self.in_force = PlanInForce(from_mapping({"b_moe_decode": 32}))
        self.in_force.fit(page_size=8, max_running=64, can_reenter=True)
        self.counters = Counters()
        self.changes = PlanChanges(self.in_force, self.counters, TraceWriter(str(path)))

    def asks(self, why: str = "", **values) -> None:
        change = PlanChange.of_message(PlanChange(values=values, why=why).as_message())
        assert change == PlanChange(values=values, why=why)
        self.changes.make(self.in_force.prepare(values), why)

    @property
    def decode(self):
        return self.in_force.plan.decode

    @property
    def records(self):
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def test_a_refinement_waits_for_a_boundary_and_its_record_replays(tmp_path):
    rank = Rank(tmp_path / "trace")
    rank.changes.at_boundary()
    rank.asks("20 % less time", b_moe_decode=48, accumulate=False)
    assert (rank.decode.b_moe, rank.changes.waits) == (32, True)
    rank.changes.at_boundary()
    assert (rank.decode.b_moe, rank.changes.waits) == (48, False)
    assert rank.counters.counts["plan_refinements"] == 1
    (record,) = rank.records
    assert (record["why"], record["before"]["decode"]["b_moe"]) == ("20 % less time", 32)
    assert record["actions"] == rank.in_force.plan.as_dict()
    assert replay_trace(rank.records) == (1, [])


def test_a_change_that_is_asked_for_comes_at_once_and_takes_a_waiting_one_with_it(tmp_path):
    rank = Rank(tmp_path / "trace")
    rank.asks("less time", b_moe_decode=48)
    rank.asks(boundary_tokens=16)
    assert (rank.decode.b_moe, rank.in_force.plan.boundary_tokens, rank.changes.waits) == (48, 16, False)
    assert rank.records[0]["why"] == "asked for, and less time"
    rank.asks(boundary_tokens=8)
    assert rank.counters.counts["plan_refinements"] == 1
    assert replay_trace(rank.records) == (2, [])


def test_a_message_with_names_of_sglang_is_no_change_of_the_plan():
    assert PlanChange.of_message({"pp_max_micro_batch_size": 4}) is None
