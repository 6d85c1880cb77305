"""A rank's sequences as they come, move and go: pages are kept for who may come, and given back by who has gone."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from scheduler_stand_ins import request

from sgl_batch.core.coroutine import Event
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.primitives import combine
from sgl_batch.core.sequence import Status
from sgl_batch.managers.sequence_table import SequenceTable
from sgl_batch.managers.trace import TraceWriter
from sgl_batch.metrics.counters import Counters
from sgl_batch.requests.prompt_groups import ChoiceTag


class NoSharing:
    """Prompts that nobody shares any more."""

    def leave(self, sequence_id):
        return 0


@pytest.fixture
def table(tmp_path):
    return SequenceTable(PageLedger(10, 64), NoSharing(), Counters(), TraceWriter(str(tmp_path / "trace.jsonl")))


def make_ready(table, *requests):
    """The sequences of these requests, prefilled."""
    for each in requests:
        sequence = table.enter(each)
        table.ledger.reserve(sequence.sequence_id, table.ledger.whole_pages(sequence))
        table.record(combine([sequence], Event.COMBINE_PREFILL, "test"))
        table.record([table.prefilled(sequence.sequence_id)])


def test_who_may_come_has_its_pages_kept_until_it_is_known_not_to_come(table):
    assert table.expect(request(1)) is None
    assert table.ledger.free_pages == 8, "100 tokens of prompt and 8 more take 2 pages of 64"
    table.expect_no_more("r1")
    assert table.ledger.free_pages == 10


def test_who_finds_no_room_is_told_the_numbers_and_nothing_is_kept(table):
    assert table.expect(request(1, max_new_tokens=600)) == "it can need 11 pages and 10 are free"
    assert table.ledger.free_pages == 10


def test_where_there_is_a_store_its_account_keeps_the_pages_of_who_may_come():
    store = PageLedger(4, 64)
    table = SequenceTable(PageLedger(10, 64), NoSharing(), Counters(), TraceWriter(None), store_ledger=store)
    assert table.expect(request(1)) is None
    assert (table.ledger.free_pages, store.free_pages) == (10, 2)
    assert table.expect(request(2, max_new_tokens=64)) == "it can need 3 pages and 2 are free"
    table.expect_no_more("r1")
    assert store.free_pages == 4


def test_who_was_suspended_can_leave_and_knows_its_tokens_where_it_comes(table):
    make_ready(table, request(1))
    table.take_ready("r1")
    table.record(combine([table["r1"]], Event.COMBINE_DECODE, "test"))
    table.record([table.suspended("r1", "test")])
    table.depart("r1")
    come = request(1, output_ids=[1] * 5)
    table.expect(come)
    table.adopt(come)
    assert table["r1"].kv_tokens == 104, "four of five tokens have KV"


def test_who_has_come_is_ready_behind_the_others_and_a_change_to_decide_over(table):
    make_ready(table, request(1))
    changes = table.changes
    arriving = request(2)
    table.expect(arriving)
    table.adopt(arriving)
    assert [sequence.sequence_id for sequence in table.ready] == ["r1", "r2"]
    assert table["r2"].status is Status.READY
    assert table["r2"].arrival > table["r1"].arrival
    assert table.request_named("r2") is arriving
    assert table.changes == changes + 1


@pytest.mark.parametrize("runs", [False, True])
def test_who_has_gone_leaves_nothing_behind(table, runs, tmp_path):
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


def test_choices_that_share_a_prompt_and_requests_that_cannot_be_written_down_stay(table):
    tag = ChoiceTag(group="g", index=0, count=2).encode()
    make_ready(table, request(1), request(2, extra_key=tag), request(3, grammar=object()), request(4, output_ids=[]))
    ready, running = table.movable(SimpleNamespace(reqs=[]))
    assert [(item.sequence.sequence_id, item.tokens, item.pages) for item in ready] == [("r1", 100, 2)]
    assert running == []


def test_who_is_retracted_is_queued_again_with_what_it_has_generated_and_holds_nothing(table):
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
    ids=["all that it had, of decode steps too", "of a prompt computed in part, that part"],
)
def test_what_a_retracted_sequence_has_lost_is_the_kv_that_it_had(table, computed, in_decode, lost):
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


def test_a_request_that_another_engine_has_begun_is_queued_with_its_tokens_and_has_no_kv(table):
    begun = request(1, max_new_tokens=80)
    begun.output_ids = [5] * 50
    sequence = table.enter(begun)
    assert (sequence.status, sequence.generated_tokens, sequence.computed_tokens) == (Status.QUEUED, 50, 0)
    assert sequence.prefill_rows == 149, "but for the last token, which the first step takes"


@pytest.mark.parametrize(
    ("tokens", "most_prompt_tokens", "may"),
    [(79, None, True), (80, None, False), (50, 150, True), (51, 150, False)],
    ids=["one is left to make", "all are made", "it fits the working memory", "it does not"],
)
def test_who_may_go_on_from_tokens(table, tokens, most_prompt_tokens, may):
    table.most_prompt_tokens = most_prompt_tokens
    assert table.may_go_on(request(1, max_new_tokens=80), tokens) is may


def test_a_refused_request_goes_on_from_nothing(table):
    refused = request(1, max_new_tokens=80)
    refused.to_finish = "it can never fit"
    assert not table.may_go_on(refused, 50)
