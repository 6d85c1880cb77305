"""Recorded decisions, written as JSON and read again, give the same actions; with one field altered they do not."""

from __future__ import annotations

import copy
import json
import random

import pytest
from rank_builders import movable, rank, running
from sequence_builders import choices, plan, sequence
from virtual_schedule import Request, VirtualSchedule

from sgl_batch.config import from_mapping
from sgl_batch.core import decide
from sgl_batch.core.actions import Abort, Migrate, Partition
from sgl_batch.core.decision_record import Observed, arrival_record, group_record, plain_actions, plan_record
from sgl_batch.core.kv_state import Interval, KVState
from sgl_batch.core.page_boundary import State
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.core.rank_agreement import decide_group
from sgl_batch.core.rank_moves import Migration
from sgl_batch.core.replay import POLICIES, ReplayError, replay
from sgl_batch.core.resident_prompts import ResidentPrompts
from sgl_batch.core.sequence import Status

PLAN = plan(b_moe_prefill=60, b_moe=8, boundary_tokens=4, page_size=8)


def as_read(records):
    """Return records as they are read from a file."""
    return [json.loads(json.dumps(record)) for record in records]


def random_decision(rng: random.Random, name: str, policy) -> dict:
    """Return the record of a decision of a rank with some sequences in each state."""
    arrivals = iter(range(1000))
    device = PageLedger(rng.randint(12, 40), 8)
    admission = device if name == "device" else PageLedger(4000, 8)
    streams = name == "streamed"

    def some(most: int, status: Status):
        made = [sequence(next(arrivals), prompt=rng.randint(1, 30), new=40, status=status) for _ in range(most)]
        for one in made:
            one.generated_tokens = rng.randint(1, 20)
        return made

    runners = some(rng.randint(0, 5), Status.RUNNING)
    prompts = ResidentPrompts()
    for one in runners:
        own = 0 if streams else min(2, device.free_pages)
        device.reserve(one.sequence_id, own)
        prompts.enter(one.sequence_id, ())
    ready = some(rng.randint(0, 6), Status.READY)
    if name.startswith("exclusive"):
        for one in ready[: rng.randint(0, 2)]:
            if device.free_pages >= 4:
                device.reserve(one.sequence_id, 4)
            else:
                break
    state = State(
        queued=[*some(rng.randint(0, 3), Status.QUEUED), *choices(3, first=500), *some(2, Status.QUEUED)],
        ready=ready,
        running=len(runners),
        steps=rng.choice([2, 4]),
        request_slots=64,
        free_request_slots=rng.randint(0, 32),
        filling=rng.random() < 0.5,
        returning=rng.choice([0, 0, 1]) if name not in ("device", "streamed") else 0,
        forked=rng.choice([0, 0, 0, 2]),
    )
    kv = KVState(
        device=device,
        admission=admission,
        runners=lambda: runners,
        estimate_shared=lambda _: None,
        prompts=prompts,
        store_free=rng.randint(0, 100),
        arrived=rng.random() < 0.1,
        streams=streams,
        interval=Interval(number=rng.randint(0, 50), alive=9, rows=rng.randint(0, 90), seconds=rng.random()),
    )
    observed = Observed(state, kv)
    actions = decide.decide(observed.state, observed.kv, PLAN, policy)
    return observed.record(PLAN, name, actions)


@pytest.mark.parametrize("name", POLICIES)
def test_decisions_of_every_form_replay_to_the_same_actions(name):
    rng, policy = random.Random(7), POLICIES[name]()
    records = [random_decision(rng, name, policy) for _ in range(300)]
    assert list(replay(as_read(records))) == []
    made = {action["action"] for record in records for action in record["actions"]}
    assert {"Step", "Prefill", "PrefillChoices", "BeginInterval"} <= made
    if name not in ("device", "overflowing", "streamed"):
        assert {"Suspend", "Restore", "Extend"} <= made


def test_a_whole_schedule_replays_to_the_same_actions():
    todo = [Request(at=i // 3, prompt=5 + i % 40, max_new=20, output=1 + i % 20, choices=1 + i % 3) for i in range(60)]
    schedule = VirtualSchedule(todo, plan(b_moe_prefill=64, ready_target=12), pages=60, request_slots=16)
    log = schedule.run(most_decisions=5000)
    assert len(schedule.records) == log.decisions
    assert list(replay(as_read(schedule.records))) == []


def recorded_group() -> dict:
    states = [
        rank(runs=running(6), ready=[movable(30)], queued=[]),
        rank(runs=running(1, first=10), ready=[], queued=[]),
    ]
    return group_record(states, PLAN, Migration.EVEN, decide_group(states, PLAN, Migration.EVEN))


def test_a_decision_for_two_ranks_replays_to_the_same_moves_and_actions():
    record = recorded_group()
    moved = {"action": "Migrate", "sequences": ["s30", "s0", "s1"], "source": 0, "target": 1}
    assert [actions[0] for actions in record["actions"]["actions"]] == [moved, moved]
    assert list(replay(as_read([record]))) == []
    elsewhere = altered(record, ("actions", "actions", 1, 0, "target"), 2)
    assert len(list(replay(as_read([elsewhere])))) == 1


def recorded_arrival(*, prompt: int, most_prompt_tokens: int | None = None, store: PageLedger | None = None) -> dict:
    come, device = sequence(prompt=prompt, new=20), PageLedger(9, 8)
    actions = decide.on_arrival(come, device, store, most_prompt_tokens=most_prompt_tokens)
    return arrival_record(come, device, store, most_prompt_tokens, actions)


def test_an_abort_of_a_sequence_that_can_never_fit_replays_with_its_numbers():
    fits, too_long = recorded_arrival(prompt=40), recorded_arrival(prompt=80)
    beyond_store = recorded_arrival(prompt=40, store=PageLedger(3, 8))
    beyond_memory = recorded_arrival(prompt=40, most_prompt_tokens=30)
    assert fits["actions"] == []
    for record, why in ((too_long, "the device holds 9"), (beyond_store, "holds 3"), (beyond_memory, "groups of 30")):
        (abort,) = record["actions"]
        assert (abort["action"], abort["sequences"]) == ("Abort", ["s0"])
        assert why in abort["why"]
    assert list(replay(as_read([fits, too_long, beyond_store, beyond_memory]))) == []
    assert len(list(replay(as_read([altered(beyond_memory, ("most_prompt_tokens",), 40)])))) == 1


def test_actions_of_several_ranks_are_recorded_whole():
    one = sequence(3, status=Status.READY)
    actions = (
        Partition(sequences=(one,), ranks=frozenset((2, 0))),
        Migrate(sequences=(one,), source=0, target=1),
        Abort(sequences=(one,), why="no room"),
    )
    plain = [
        {"action": "Partition", "sequences": ["s3"], "ranks": [0, 2]},
        {"action": "Migrate", "sequences": ["s3"], "source": 0, "target": 1},
        {"action": "Abort", "sequences": ["s3"], "why": "no room"},
    ]
    assert as_read(plain_actions(actions)) == plain


def test_a_replay_reads_the_ranks_that_a_sequence_belongs_to():
    record = recorded_group()
    of_two = altered(record, ("ranks", 0, "ready", 0, "sequence", "ranks"), [0, 1])
    (difference,) = replay(as_read([of_two]))
    assert difference.replayed["actions"][0][0]["sequences"] == ["s0", "s1", "s2"]


def altered(record: dict, path: tuple, value) -> dict:
    changed = copy.deepcopy(record)
    at = changed
    for name in path[:-1]:
        at = at[name]
    assert at[path[-1]] != value
    at[path[-1]] = value
    return changed


def tight_boundary() -> dict:
    """Return the record of a boundary at which one of two runners is suspended."""
    young, old = (sequence(i, prompt=8, new=100, status=Status.RUNNING) for i in range(2))
    old.generated_tokens = 40
    waits = sequence(2, prompt=8, new=100, status=Status.SUSPENDED)
    device = PageLedger(9, 8)
    device.reserve("s0", 2)
    device.reserve("s1", 6)
    state = State(queued=[], ready=[waits], running=2, steps=4, request_slots=9, free_request_slots=9, filling=False)
    kv = KVState(
        device=device, admission=PageLedger(99, 8), runners=lambda: [young, old], estimate_shared=lambda _: None
    )
    observed = Observed(state, kv)
    policy = POLICIES["inclusive"]()
    return observed.record(PLAN, "inclusive", decide.decide(observed.state, observed.kv, PLAN, policy))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("kv", "device", "total_pages"), 40),
        (("kv", "runners", 0, "generated_tokens"), 60),
        (("kv", "runners", 0, "prompt_tokens"), 30),
        (("kv", "arrived"), True),
        (("state", "forked"), 1),
        (("state", "steps"), 3),
        (("state", "returning"), 7),
        (("plan", "boundary_tokens"), 64),
        (("policy",), "device"),
        (("state", "ready", "rows", 0, "prompt_tokens"), 50),
        (("actions", 1, "sequences"), ["s0"]),
    ],
    ids=str,
)
def test_a_record_with_one_field_altered_no_longer_replays(path, value):
    record = tight_boundary()
    assert list(replay(as_read([record]))) == []
    differences = list(replay(as_read([altered(record, path, value)])))
    assert [difference.number for difference in differences] == [1]


def test_a_record_that_no_engine_has_written_differs_and_stops_nothing():
    by_hand = {"decision": "group", "version": tight_boundary()["version"], "actions": []}
    found = list(replay(as_read([by_hand, tight_boundary()])))
    assert [one.number for one in found] == [1]
    assert "the decision fails: KeyError" in found[0].replayed


def test_the_plan_changes_only_where_a_record_says_so():
    in_force = PlanInForce(from_mapping({"boundary_tokens": 4}))
    before = in_force.fit(page_size=8, max_running=64, can_reenter=True)
    in_force.apply(in_force.prepare({"boundary_tokens": 2}))
    change = plan_record(before, in_force.plan, in_force.config.flat(), in_force.device_facts(), "less time")
    first = {**tight_boundary(), "plan": before.as_dict()}
    second = altered(first, ("plan", "boundary_tokens"), 2)
    assert list(replay(as_read([first, change, second, second]))) == []
    assert [one.number for one in replay(as_read([first, second, second]))] == [2], "another plan without a change"
    assert [one.number for one in replay(as_read([first, change, first]))] == [3]
    assert [one.number for one in replay(as_read([altered(change, ("flags", "boundary_tokens"), 3)]))] == [1]


def test_a_record_of_another_version_is_refused():
    with pytest.raises(ReplayError, match="record 1 has version 7; this program reads 8"):
        list(replay([altered(tight_boundary(), ("version",), 7)]))
