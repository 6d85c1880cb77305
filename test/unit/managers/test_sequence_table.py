"""A rank's sequences from arrival to departure: pages are reserved for expected sequences, and freed by ended ones."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from scheduler_stand_ins import request
from sequence_builders import plan

from sgl_batch.core.admission_policy import TwoPage
from sgl_batch.core.coroutine import Event
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.primitives import combine
from sgl_batch.core.sequence import Status
from sgl_batch.managers.sequence_table import SequenceTable
from sgl_batch.managers.trace import TraceWriter
from sgl_batch.metrics.counters import Counters
from sgl_batch.requests.prompt_groups import ChoiceTag

PLAN = plan(page_size=64, boundary_tokens=64)


class NoSharing:
    """An account in which no pages are shared."""

    def leave(self, sequence_id):
        return 0


@pytest.fixture
def table(tmp_path):
    return SequenceTable(PageLedger(10, 64), NoSharing(), Counters(), TraceWriter(str(tmp_path / "trace.jsonl")))


def make_ready(table, *requests):
    """Enter these requests and prefill their sequences."""
    for each in requests:
        sequence = table.enter(each)
        table.ledger.reserve(sequence.sequence_id, table.ledger.whole_pages(sequence))
        table.record(combine([sequence], Event.COMBINE_PREFILL, "test"))
        table.record([table.prefilled(sequence.sequence_id)])


def test_an_expected_sequence_has_pages_reserved_until_it_is_cancelled(table):
    assert table.expect(request(1), PLAN) is None
    assert table.ledger.free_pages == 8, "100 tokens of prompt and 8 more take 2 pages of 64"
    table.expect_no_more("r1")
    assert table.ledger.free_pages == 10


def test_a_sequence_without_room_is_refused_with_the_numbers_and_reserves_nothing(table):
    assert table.expect(request(1, max_new_tokens=600), PLAN) == "it can need 11 pages and 10 are free"
    assert table.ledger.free_pages == 10


def test_with_a_store_its_account_reserves_the_pages_of_an_expected_sequence():
    store = PageLedger(4, 64)
    table = SequenceTable(PageLedger(10, 64), NoSharing(), Counters(), TraceWriter(None), store_ledger=store)
    assert table.expect(request(1), PLAN) is None
    assert (table.ledger.free_pages, store.free_pages) == (10, 2)
    assert table.expect(request(2, max_new_tokens=64), PLAN) == "it can need 3 pages and 2 are free"
    table.expect_no_more("r1")
    assert store.free_pages == 4


def growing_table(pages):
    ledger = PageLedger(pages, 64, policy=TwoPage())
    return SequenceTable(ledger, NoSharing(), Counters(), TraceWriter(None))


def test_where_reservations_grow_an_expected_sequence_reserves_what_it_needs_to_the_next_boundary():
    table = growing_table(20)
    arriving = request(1, max_new_tokens=600, output_ids=[1] * 60)
    assert table.expect(arriving, PLAN) is None
    assert (table.ledger.held("r1"), table.ledger.whole_need("r1")) == (5, 11), "159 tokens are in 3 pages"
    why = table.expect(request(2, max_new_tokens=1000), PLAN)
    assert why == "it needs 4 pages now, and can need 18 pages and 9 are free"
    table.expect_no_more("r1")
    assert table.ledger.free_pages == 20


def test_where_sequences_wait_for_pages_none_is_expected():
    table = growing_table(20)
    table.ledger.reserve("r9", 3, whole=4)
    table.ledger.stall("r9", 0)
    assert "come first" in table.expect(request(1), PLAN)
    assert not table.ledger.holds("r1")


def test_a_movable_sequence_says_what_it_reserves_elsewhere_and_can_need_beyond():
    table = growing_table(20)
    running = request(1, max_new_tokens=600, kv_committed_len=159)
    make_ready(table, running)
    table.take_ready("r1")
    running.output_ids = [1] * 60
    ready, (item,) = table.movable(SimpleNamespace(reqs=[running]), PLAN)
    assert ready == []
    assert (item.tokens, item.pages, item.gap, item.sequence.generated_tokens) == (159, 5, 6, 60)


def test_a_suspended_sequence_can_depart_and_keeps_its_number_of_tokens(table):
    make_ready(table, request(1))
    table.take_ready("r1")
    table.record(combine([table["r1"]], Event.COMBINE_DECODE, "test"))
    table.record([table.suspended("r1", "test")])
    table.depart("r1")
    arriving = request(1, output_ids=[1] * 5)
    table.expect(arriving, PLAN)
    table.adopt(arriving)
    assert table["r1"].kv_tokens == 104, "four of five tokens have KV"


def test_an_adopted_sequence_is_ready_after_the_others_and_counts_as_a_change(table):
    make_ready(table, request(1))
    changes = table.changes
    arriving = request(2)
    table.expect(arriving, PLAN)
    table.adopt(arriving)
    assert [sequence.sequence_id for sequence in table.ready] == ["r1", "r2"]
    assert table["r2"].status is Status.READY
    assert table["r2"].arrival > table["r1"].arrival
    assert table.request_named("r2") is arriving
    assert table.changes == changes + 1


@pytest.mark.parametrize("runs", [False, True])
def test_a_departed_sequence_leaves_nothing_behind(table, runs, tmp_path):
    make_ready(table, request(1))
    if runs:
        sequence = table["r1"]
        table.take_ready("r1")
        table.record(combine([sequence], Event.COMBINE_DECODE, "test"))
    assert table.is_running("r1") is runs
    table.depart("r1")
    assert table.is_empty
    assert not len(table.ready)
    assert table.ledger.free_pages == 10
    last = json.loads((tmp_path / "trace.jsonl").read_text().splitlines()[-1])
    assert (last["sequence"], last["to"]) == ("r1", "MIGRATING")


def test_requests_that_cannot_be_written_down_are_not_movable(table):
    make_ready(table, request(1), request(2, session=object()), request(3, output_ids=[]))
    ready, running = table.movable(SimpleNamespace(reqs=[]), PLAN)
    assert [(item.sequence.sequence_id, item.tokens, item.pages) for item in ready] == [("r1", 100, 2)]
    assert running == []


def test_a_choice_that_moves_reserves_all_of_its_prompt_elsewhere_and_shares_it_no_more(table):
    tag = ChoiceTag(group="g", index=0, count=2).encode()
    make_ready(table, request(1, extra_key=tag))
    (item,), _ = table.movable(SimpleNamespace(reqs=[]), PLAN)
    assert item.pages == 2
    table.depart("r1")
    arriving = request(1, extra_key=tag)
    table.expect(arriving, PLAN)
    table.adopt(arriving)
    assert table.ledger.held("r1") == 2
    assert (table["r1"].prompt_group, table["r1"].is_leader) == (None, False)


def test_a_retracted_sequence_is_queued_with_its_tokens_and_holds_no_pages(table):
    running = request(1, output_ids=[1])
    make_ready(table, running)
    table.take_ready("r1")
    table.record(combine([table["r1"]], Event.COMBINE_DECODE, "test"))
    running.output_ids = [1] * 5
    sequence = table.retracted(running)
    assert (sequence.status, sequence.prefill_rows, sequence.lost_tokens) == (Status.QUEUED, 104, 104)
    assert table.ledger.free_pages == 10


@pytest.mark.parametrize(
    ("computed", "in_decode", "lost"),
    [(100, True, 104), (64, False, 64)],
    ids=["prompt and decoded tokens", "a part of the prompt"],
)
def test_a_retracted_sequence_has_lost_the_kv_that_it_had(table, computed, in_decode, lost):
    retracted = request(1, output_ids=[1] * 5 if in_decode else [])
    sequence = table.enter(retracted)
    table.record(combine([sequence], Event.COMBINE_PREFILL, "test"))
    sequence.computed_tokens = computed
    if in_decode:
        table.record([table.prefilled("r1")])
        table.take_ready("r1")
        table.record(combine([sequence], Event.COMBINE_DECODE, "test"))
    assert table.retracted(retracted).lost_tokens == lost
    assert sequence.computed_tokens == 0


def test_a_resumed_request_is_queued_with_its_tokens_and_has_no_kv(table):
    begun = request(1, max_new_tokens=80)
    begun.output_ids = [5] * 50
    sequence = table.enter(begun)
    assert (sequence.status, sequence.generated_tokens, sequence.computed_tokens) == (Status.QUEUED, 50, 0)
    assert sequence.prefill_rows == 149, "all tokens but the last, which the first step computes"


@pytest.mark.parametrize(
    ("tokens", "most_prompt_tokens", "may"),
    [(79, None, True), (80, None, False), (50, 150, True), (51, 150, False)],
    ids=["one token is left", "none is left", "it fits the working memory", "it does not"],
)
def test_a_request_can_resume_while_tokens_are_left_and_memory_suffices(table, tokens, most_prompt_tokens, may):
    table.most_prompt_tokens = most_prompt_tokens
    assert table.can_resume(request(1, max_new_tokens=80), tokens) is may


def test_a_refused_request_cannot_resume(table):
    refused = request(1, max_new_tokens=80)
    refused.to_finish = "it can never fit"
    assert not table.can_resume(refused, 50)


def make_running(table, *requests):
    make_ready(table, *requests)
    for each in requests:
        table.take_ready(each.rid)
        table.record(combine([table[each.rid]], Event.COMBINE_DECODE, "test"))


def make_set(table):
    """Let the table run r1, and a replica of r2, partitioned over ranks 0 and 3."""
    own, replica = request(1), request(2)
    make_running(table, own)
    assert table.expect_replica(replica) is None
    table.adopt_replica(replica)
    table.begin_partition(["r1", "r2"], frozenset((0, 3)))
    return own, replica


def ended(of, kind="stop"):
    of.finished_reason = SimpleNamespace(to_json=lambda: {"type": kind})
    return of


def counted(table):
    return {name: number for name, number in table._counters.counts.items() if number}


def test_a_replica_reserves_all_that_it_can_need_or_is_refused_with_the_numbers():
    table = growing_table(20)
    assert table.expect_replica(request(1, max_new_tokens=600)) is None
    assert table.ledger.held("r1") == table.ledger.whole_need("r1") == 11
    why = table.expect_replica(request(2, max_new_tokens=600))
    assert why == "its replica can need 11 pages and 9 are free"
    table.expect_no_more("r1")
    assert table.ledger.free_pages == 20


@pytest.mark.parametrize(("pages", "fits"), [(20, True), (19, False)])
def test_owners_reserve_all_that_they_can_need_if_there_is_room(pages, fits):
    table = growing_table(pages)
    for name, whole in (("r1", 9), ("r2", 11)):
        table.ledger.reserve(name, 3, whole=whole)
    assert table.reserve_whole(["r1", "r2"]) is fits
    assert (table.ledger.held("r1"), table.ledger.held("r2")) == ((9, 11) if fits else (3, 3))


def test_sequences_of_a_partition_belong_to_its_ranks_until_it_ends(table):
    make_set(table)
    assert table.partition == table["r1"].ranks == table["r2"].ranks == {0, 3}
    assert (table.num_replicas, table.is_replica("r1"), table.is_replica("r2")) == (1, False, True)
    table.drop_replica("r2")
    table.end_partition()
    assert table.partition == frozenset()
    assert (table["r1"].ranks, table["r1"].status, "r2" in table) == ({0}, Status.RUNNING, False)
    assert table.ledger.free_pages == 8


def test_a_partition_ends_with_its_last_sequence(table):
    own, replica = make_set(table)
    table.record([table.finish(ended(own)), table.finish(ended(replica))])
    assert (table.partition, table.num_replicas, table.is_empty) == (frozenset(), 0, True)


@pytest.mark.parametrize("kind", ["stop", "abort"])
def test_the_end_of_a_replica_is_neither_counted_nor_traced(table, kind, tmp_path):
    own, replica = make_set(table)
    table.record([table.finish(ended(own, kind)), table.finish(ended(replica, kind))])
    counts = counted(table)
    assert counts.get("sequences_finished", 0) + counts.get("sequences_aborted", 0) == 1
    assert counts["generated_tokens"] == 1
    events = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert {event["sequence"] for event in events} == {"r1"}


def test_replicas_cannot_move_and_are_in_no_count_of_states(table):
    own, replica = make_set(table)
    _, (item,) = table.movable(SimpleNamespace(reqs=[own, replica]), PLAN)
    assert item.sequence.sequence_id == "r1"
    assert table.num_by_status() == {"RUNNING": 1}


def test_a_retracted_sequence_belongs_to_its_rank_alone(table):
    own, _ = make_set(table)
    table.drop_replica("r2")
    assert table.retracted(own).ranks == {0}
    assert table.partition == frozenset()


def test_a_sequence_with_a_search_that_may_time_out_is_not_replicable(table):
    patient = request(1)
    patient.sampling_params.stop_regex_strs = "(a+)+$"
    make_ready(table, patient, request(2))
    ready, _ = table.movable(SimpleNamespace(reqs=[]), PLAN)
    assert [item.replicable for item in ready] == [False, True]


def test_a_sequence_that_waited_on_another_rank_keeps_its_turn(table):
    make_ready(table, request(1), request(2))
    table.at_boundary(3)
    make_ready(table, request(3))
    table.ledger.release("r3")  # its KV is in a store
    for number, since in ((4, table["r3"].waits_since - 1), (5, table["r3"].waits_since + 7)):
        arriving = request(number)
        assert table.expect(arriving, PLAN) is None
        table.adopt(arriving, since)
    make_ready(table, request(6))
    assert [sequence.sequence_id for sequence in table.ready] == ["r1", "r2", "r4", "r3", "r5", "r6"]
    turns = [sequence.waits_since for sequence in table.ready]
    assert turns == sorted(turns), "later ones wait behind those that have arrived"
