"""A prompt that all ranks compute: all have its replica or none has, and a replica ends with its first token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import SimpleNamespace

import pytest
from scheduler_stand_ins import request
from test_sequence_table import NoSharing

from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.managers import rank_prompts
from sgl_batch.managers.rank_messages import PartitionRow
from sgl_batch.managers.rank_prompts import PromptMessage, RankPrompts
from sgl_batch.managers.sequence_table import SequenceTable
from sgl_batch.managers.trace import TraceWriter
from sgl_batch.metrics.counters import Counters

# Rank 0 owns the prompt.
ROW = PartitionRow(["r0"], [0], [0, 1, 2])
TOKENS = [7] * 100
PAGES = 20


class Wire:
    """One rank's end of a channel: what it has sent, and what it will receive from rank 0."""

    def __init__(self, rank: int, *received: PromptMessage) -> None:
        self.rank, self._received = rank, list(received)
        self.sent: list[tuple[int, PromptMessage]] = []

    def send(self, peer: int, message: PromptMessage) -> None:
        self.sent.append((peer, message))

    def recv(self, peers: Collection[int], *, timeout_s: float, awaiting: str) -> tuple[int, PromptMessage]:
        assert peers == [0]
        return 0, self._received.pop(0)


class OneRank:
    """One rank without sequences. `agreed` has what it told the others; `verdicts`: what all have agreed."""

    def __init__(self, wire: Wire, *, pages: int = PAGES, verdicts: Sequence[bool] = (True,)) -> None:
        left = list(verdicts)
        self.counters, self.agreed, self.wire = Counters(), list[bool](), wire
        self.table = SequenceTable(PageLedger(pages, 64), NoSharing(), self.counters, TraceWriter(None), rank=wire.rank)

        def all_done(done: bool) -> bool:
            self.agreed.append(done)
            return left.pop(0)

        self.prompts = RankPrompts(None, self.table, wire, all_done, self.counters)


@pytest.fixture(autouse=True)
def plain_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let replicas be stand-ins of requests, and batches have their lengths."""

    def replica(scheduler: object, rid: str, tokens: list[int]) -> SimpleNamespace:
        return request(int(rid[1:]), max_new_tokens=1, origin_input_ids=tokens, output_ids=[])

    def batch(scheduler: object, requests: list[SimpleNamespace], ends: dict[str, int]) -> SimpleNamespace:
        assert not ends, "a replica is computed whole"
        return SimpleNamespace(reqs=requests, extend_lens=[len(one.origin_input_ids) for one in requests])

    monkeypatch.setattr(rank_prompts, "prompt_replica", replica)
    monkeypatch.setattr(rank_prompts, "prefill_batch", batch)


def owner(*, verdict: bool = True, **fields) -> OneRank:
    one = OneRank(Wire(0), verdicts=(verdict,))
    one.table.enter(request(0, origin_input_ids=TOKENS, **{"output_ids": [], **fields}))
    return one


def other(*, tokens: Sequence[int] = TOKENS, verdict: bool = True, pages: int = PAGES) -> OneRank:
    return OneRank(Wire(1, PromptMessage("r0", list(tokens))), pages=pages, verdicts=(verdict,))


def test_the_owner_sends_the_tokens_to_all_others_and_counts_the_prompt():
    one = owner()
    assert one.prompts.begin(ROW)
    assert one.wire.sent == [(peer, PromptMessage("r0", TOKENS)) for peer in (1, 2)]
    assert (one.agreed, one.counters.counts["prompts_partitioned"]) == ([True], 1)


@pytest.mark.parametrize(
    "fields", [{"return_logprob": True}, {"input_embeds": [[0.5]]}, {"output_ids": [3]}, {"to_finish": object()}]
)
def test_a_prompt_that_its_tokens_do_not_describe_is_computed_alone(fields):
    one = owner(verdict=False, **fields)
    assert not one.prompts.begin(ROW)
    assert [message.tokens for _, message in one.wire.sent] == [[], []]
    assert (one.agreed, one.counters.counts["prompts_not_partitioned"]) == ([False], 1)


def test_another_rank_computes_a_replica_that_reserves_the_prompts_pages_alone():
    one = other()
    assert one.prompts.begin(ROW)
    assert one.table.is_replica("r0")
    assert one.table.ledger.free_pages == PAGES - 2, "100 tokens lie on 2 pages of 64"
    assert [row.rid for row in one.prompts.batch().reqs] == ["r0"]
    assert one.table["r0"].computed_tokens == 100
    assert one.table.num_by_status() == {}, "its owner counts it"


def test_a_replica_is_gone_when_it_has_its_first_token():
    one = other()
    one.prompts.begin(ROW)
    (replica,) = one.prompts.batch().reqs
    replica.output_ids = [9]
    replica.finished_reason = SimpleNamespace(to_json=lambda: {"type": "length"})
    one.table.record([one.table.finish(replica)])
    assert (one.table.is_empty, one.table.ledger.free_pages) == (True, PAGES)
    assert one.table.take_ended() == []
    assert one.counters.counts["sequences_finished"] == one.counters.counts["generated_tokens"] == 0


@pytest.mark.parametrize(("pages", "agreed"), [(1, False), (PAGES, True)], ids=["it lacks pages", "another rank does"])
def test_where_one_rank_has_no_replica_none_stays(pages, agreed):
    one = other(pages=pages, verdict=False)
    assert not one.prompts.begin(ROW)
    assert (one.agreed, one.table.is_empty, one.table.ledger.free_pages) == ([agreed], True, pages)


def test_a_rank_takes_no_part_in_a_prompt_whose_owner_sends_no_tokens():
    one = other(tokens=(), verdict=False)
    assert not one.prompts.begin(ROW)
    assert (one.agreed, one.table.is_empty) == ([False], True)


def test_a_rank_with_a_sequence_of_the_same_id_takes_no_part():
    one = other(verdict=False)
    one.table.enter(request(0, output_ids=[]))
    assert not one.prompts.begin(ROW)
    assert one.agreed == [False]
