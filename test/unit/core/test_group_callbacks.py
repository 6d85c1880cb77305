"""Callbacks of a user decide; an answer that cannot be carried out is named, and the default decides from then on."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from rank_builders import PLAN, movable, rank, running
from rank_scenarios import roomy, tight
from sequence_builders import sequence
from virtual_ranks import VirtualRanks

from moving_callbacks import hold_all_but_one, rotate
from sgl_batch.core.actions import EndPartition, Hold, Migrate, Partition, PrefillPhase, Step
from sgl_batch.core.decision_record import group_record
from sgl_batch.core.group_callbacks import Callbacks
from sgl_batch.core.group_decider import GroupDecider
from sgl_batch.core.group_view import GroupView
from sgl_batch.core.long_tail import hold_level
from sgl_batch.core.rank_agreement import decide_group
from sgl_batch.core.rank_moves import Migration
from sgl_batch.core.rank_state import RankState
from sgl_batch.core.refill import prefill_first
from sgl_batch.core.replay import replay
from sgl_batch.errors import ConfigError


def answering(*actions) -> Callbacks:
    """Return callbacks of a user that return these actions."""
    return of(lambda view: tuple(actions), lambda view: tuple(actions))


def of(on_refill, on_long_tail) -> Callbacks:
    return Callbacks(
        on_refill=on_refill, on_long_tail=on_long_tail, names={"on_refill": "mine:fill", "on_long_tail": "mine:tail"}
    )


TAIL = [rank(runs=running(3)), rank(runs=running(2, first=10))]
REFILL = [rank(runs=running(3), ready=[movable(5)], queued=[]), rank(unmovable_running=2)]
QUEUED = [rank(queued=[sequence(0)]), rank()]
S0, S10 = TAIL[0].running[0].sequence, TAIL[1].running[0].sequence
ALL = tuple(item.sequence for one in TAIL for item in one.running)


def migrate(sequence_, source: int, target: int) -> Migrate:
    return Migrate(sequences=(sequence_,), source=source, target=target)


@pytest.mark.parametrize(
    ("ranks", "actions", "why"),
    [
        (TAIL, [migrate(S0, 0, 2)], "Migrate of s0 from rank 0 to rank 2, and the ranks are 0 to 1"),
        (TAIL, [migrate(S0, 0, 0)], "from rank 0 to rank 0, which is no other rank"),
        (TAIL, [migrate(S0, 1, 0)], "and rank 1 has no sequence s0 that may leave it"),
        (TAIL, [migrate(S0, 0, 1), migrate(S0, 0, 1)], "rank 0 has no sequence s0 that may leave it"),
        (
            TAIL,
            [PrefillPhase()],
            "PrefillPhase; when nothing waits it may return Migrate, Partition",
        ),
        (TAIL, [Step()], "Step; when nothing waits it may return"),
        (TAIL, [Hold(ranks=frozenset({0, 1}))], "Hold over ranks 0, 1, and no other rank has a sequence to decode"),
        (TAIL, [Hold(ranks=frozenset({3}))], "Hold over ranks 3, and the ranks are 0 to 1"),
        (TAIL, [EndPartition(ranks=frozenset({0, 1}))], "no sequence is partitioned over these ranks"),
        (
            TAIL,
            [Partition(sequences=(S0,), ranks=frozenset({0}))],
            "and a partition is over at least two of ranks 0 to 1, not [0]",
        ),
        (TAIL, [Partition(sequences=(S0,), ranks=frozenset({0, 1}))], "and the ranks [0, 1] run 5 sequences"),
        (TAIL, [Partition(sequences=ALL, ranks=frozenset({0, 1}))] * 2, "rank 0 has another partition"),
        (
            [rank(runs=running(3), free_request_slots=0), *TAIL[1:]],
            [migrate(S10, 1, 0)],
            "s10 takes 2 pages where 1000 are free, and a request slot where 0 are",
        ),
        ([rank(runs=running(3), free_pages=1), *TAIL[1:]], [migrate(S10, 1, 0)], "takes 2 pages where 1 are free"),
        (REFILL, [Hold(ranks=frozenset({0}))], "while sequences wait it may return Migrate, PrefillPhase"),
        (REFILL, [PrefillPhase()], "no rank is below --refill-watermark"),
        (QUEUED, [], "no PrefillPhase, and nothing else can be done: all sequences are queued"),
        (QUEUED, [PrefillPhase(), PrefillPhase()], "2 actions with PrefillPhase, which stands alone"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_answer_that_cannot_be_carried_out_is_named_and_the_default_decides(ranks, actions, why):
    decision = decide_group(ranks, PLAN, Migration.EVEN, answering(*actions))
    name = "on_long_tail is 'mine:tail'" if ranks[0].state.queued == ranks[0].state.ready == [] else "on_refill is"
    assert decision.fault is not None
    assert decision.fault.text.startswith(f"{name}")
    assert why in decision.fault.text
    assert decision.fault.text.endswith("the default decides from now on")
    assert dataclasses.replace(decision, fault=None) == decide_group(ranks, PLAN, Migration.EVEN)


def test_a_value_that_is_no_tuple_is_named():
    decision = decide_group(TAIL, PLAN, Migration.EVEN, of(None, lambda view: None))
    assert "it returned a value of type NoneType, where it must return a tuple" in decision.fault.text


def test_without_migration_a_callback_moves_nothing():
    decision = decide_group(TAIL, PLAN, Migration.NEVER, answering(migrate(S0, 0, 1)))
    assert "--migration never lets no sequence move" in decision.fault.text
    assert decision.moves == ()


def test_after_its_first_wrong_answer_a_callback_is_not_asked_again():
    asked: list[GroupView] = []

    def wrong(view: GroupView):
        asked.append(view)
        return

    decider = GroupDecider(Migration.EVEN, of(wrong, wrong))
    faults = [decider.decide(ranks, PLAN).fault for ranks in (TAIL, TAIL, REFILL, REFILL, TAIL)]
    assert [fault and fault.callback for fault in faults] == ["on_long_tail", None, "on_refill", None, None]
    assert len(asked) == 2
    assert decider.callbacks.names == {}


def test_a_callback_sees_sequences_limits_pages_and_the_outputs_that_have_ended():
    seen: list[GroupView] = []
    callbacks = of(None, lambda view: seen.append(view) or ())
    decider = GroupDecider(Migration.EVEN, callbacks)
    decider.decide([dataclasses.replace(one, ended=(30, 50)) for one in TAIL], PLAN)
    decider.decide([TAIL[0], dataclasses.replace(TAIL[1], ended=(70,))], PLAN)
    assert [len(view.ended) for view in seen] == [5, 5], "one object, which grows"
    assert seen[1].ended.mean_above(40) == pytest.approx((50 + 50 + 70) / 3)
    assert (seen[1].num_running, seen[1].waits, seen[1].plan) == (5, False, PLAN)
    assert [item.sequence.sequence_id for _, item in seen[1].running()] == ["s0", "s1", "s2", "s10", "s11"]
    assert seen[1].evening == ()


# Whole schedules.


def sometimes_wrong(view: GroupView):
    return None if view.num_running % 5 == 4 else view.evening


@pytest.mark.parametrize(
    ("on_refill", "on_long_tail"),
    [(prefill_first, hold_level), (rotate, hold_all_but_one), (rotate, rotate), (sometimes_wrong, sometimes_wrong)],
    ids=lambda function: function.__name__,
)
@pytest.mark.parametrize("make", [tight, roomy])
def test_whatever_callbacks_decide_ranks_stay_together_every_sequence_ends_and_decisions_replay(
    make, on_refill, on_long_tail
):
    known = {"mine:fill": on_refill, "mine:tail": on_long_tail}
    steps, faults = 0, []
    for seed in range(12):
        scenario = make(seed)
        if on_refill is sometimes_wrong:
            known["mine:fill"] = lambda view: (PrefillPhase(),) if view.prefills else sometimes_wrong(view)
        callbacks = of(known["mine:fill"], on_long_tail)
        ranks = VirtualRanks(**scenario.arguments, migration=Migration.EVEN, callbacks=callbacks)
        try:
            log = ranks.run()
            assert len(log.ended_at) + len(log.refused) == sum(request.choices for request in scenario.requests)
            assert list(replay(ranks.records, lambda which, name: known[name])) == []
        except AssertionError as error:
            error.add_note(f"seed {seed}, step {ranks.log.steps}")
            raise
        steps, faults = steps + log.steps, [*faults, *log.faults]
    assert steps > 500
    assert bool(faults) is (sometimes_wrong in (on_refill, on_long_tail))


def test_the_function_in_the_docs_decides(repo_root: Path):
    (source,) = re.findall(r"```python\n(.*?)```", (repo_root / "docs" / "ranks.md").read_text(), re.DOTALL)
    written: dict[str, Any] = {}
    exec(source, written)
    callbacks = of(prefill_first, written["on_long_tail"])
    for counts, num_moved in (((5, 3), 0), ((6, 3), 1)):
        ranks = [rank(runs=running(count, first=10 * number)) for number, count in enumerate(counts)]
        decision = decide_group(ranks, PLAN, Migration.EVEN, callbacks)
        assert (decision.fault, len(decision.moves)) == (None, num_moved)


def recorded(ranks: list[RankState]) -> dict:
    callbacks = of(prefill_first, hold_level)
    decision = decide_group(ranks, PLAN, Migration.EVEN, callbacks)
    return json.loads(json.dumps(group_record(ranks, PLAN, Migration.EVEN, decision, callbacks.names)))


def test_a_replay_without_the_callback_s_module_says_what_is_missing():
    def missing(which: str, name: str):
        raise ConfigError(f"{which} is {name!r}, and the module cannot be imported")

    (difference,) = replay([recorded(TAIL)], missing)
    assert difference.replayed == "on_refill is 'mine:fill', and the module cannot be imported"
    (difference,) = replay([recorded(TAIL)])
    assert difference.replayed == "on_refill was 'mine:fill', which is not known here"


def test_a_replay_remembers_the_outputs_that_have_ended():
    rng = random.Random(0)
    callbacks, decider_records = of(prefill_first, hold_level), []
    decider = GroupDecider(Migration.EVEN, callbacks)
    for _ in range(30):
        ranks = [
            rank(runs=[movable(100 * i + j, status=one.running[0].sequence.status) for j in range(rng.randint(1, 4))])
            for i, one in enumerate(TAIL)
        ]
        for one in ranks:
            for item in one.running:
                item.sequence.generated_tokens, item.sequence.max_new_tokens = rng.randint(1, 90), 200
        ranks[0] = dataclasses.replace(ranks[0], ended=tuple(rng.randint(1, 150) for _ in range(rng.randint(0, 3))))
        decision = decider.decide(ranks, PLAN)
        record = group_record(ranks, PLAN, Migration.EVEN, decision, callbacks.names)
        decider_records.append(json.loads(json.dumps(record)))
    known = {"mine:fill": prefill_first, "mine:tail": hold_level}
    assert list(replay(decider_records, lambda which, name: known[name])) == []
    without = [{**record, "ranks": [{**one, "ended": []} for one in record["ranks"]]} for record in decider_records]
    assert list(replay(without, lambda which, name: known[name])) != []
