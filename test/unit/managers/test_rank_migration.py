"""A rank's sequences as migration sees them: with their pages, and with pages that were copied before they move."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sequence_builders import plan

from sgl_batch.core.coroutine import Event
from sgl_batch.core.early_copies import EarlyCopy
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.primitives import combine
from sgl_batch.managers.pages_ahead import PagesAhead
from sgl_batch.managers.rank_migration import RankSequences
from sgl_batch.managers.sequence_table import SequenceTable
from sgl_batch.managers.trace import TraceWriter
from sgl_batch.metrics.counters import Counters
from sgl_batch.migration.header import SequenceHeader
from sgl_batch.migration.store import Export, Refusal, layout_fault
from sgl_batch.sglang_adapter import bootstrap

with bootstrap.importing():
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
    from sglang.srt.sampling.sampling_params import SamplingParams

PAGE, LAYERS, NUM_PAGES, MOST = 4, 2, 20, 64
PLAN = plan(page_size=PAGE, boundary_tokens=PAGE)


class Allocator:
    """Hands out whole pages; page 0 is nobody's, as in SGLang."""

    def __init__(self, pool: Any) -> None:
        self._pool, self.free_list = pool, list(range(1, NUM_PAGES + 1))

    def get_kvcache(self) -> Any:
        return self._pool

    def alloc(self, tokens: int) -> torch.Tensor:
        pages = torch.tensor([self.free_list.pop() for _ in range(tokens // PAGE)], dtype=torch.int64)
        return (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()

    def free(self, kv_indices: torch.Tensor) -> None:
        pages = torch.unique(kv_indices // PAGE).tolist()
        assert not set(pages) & set(self.free_list), "a page is freed once"
        self.free_list += pages


class RequestTable:
    """Request slots and the KV indices of each."""

    def __init__(self) -> None:
        self.req_to_token, self._free = torch.zeros(8, MOST, dtype=torch.int32), list(range(8))

    def alloc(self, requests: list[Any]) -> list[int]:
        for request in requests:
            request.req_pool_idx = self._free.pop()
        return [request.req_pool_idx for request in requests]


class Rank:
    """One rank's table, pages and store of sequences."""

    def __init__(self) -> None:
        parts = [(torch.zeros(NUM_PAGES + 1, PAGE), torch.zeros(NUM_PAGES + 1, PAGE)) for _ in range(LAYERS)]
        self.pool = SimpleNamespace(layer_num=LAYERS, page_parts=lambda layer: parts[layer], dtype=torch.float32)
        self.allocator = Allocator(self.pool)
        self.scheduler: Any = SimpleNamespace(
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            device="cpu",
            tokenizer=None,
            req_to_token_pool=RequestTable(),
            model_config=SimpleNamespace(hf_eos_token_id={0}, vocab_size=512),
            grammar_manager=SimpleNamespace(grammar_backend=None, process_req_with_grammar=lambda _: False),
        )
        sharing, counters = SimpleNamespace(leave=lambda _: 0), Counters()
        self.table = SequenceTable(PageLedger(NUM_PAGES, PAGE), sharing, counters, TraceWriter(None))
        self.ahead = PagesAhead(self.scheduler, self.table, counters)
        executor: Any = SimpleNamespace(table=self.table, plan=PLAN)
        self.store = RankSequences(self.scheduler, executor, ahead=self.ahead)

    def put(self, name: str, *, tokens: int) -> Any:
        """Add a READY sequence with KV of `tokens`, whose pages have its tokens' numbers."""
        request = Req(name, "", array("q", range(tokens)), SamplingParams(max_new_tokens=8), vocab_size=512)
        sequence = self.table.enter(request)
        request.output_ids, request.kv_committed_len = array("q", [7]), tokens
        pages = self.table.ledger.whole_pages(sequence)
        self.table.ledger.reserve(name, pages)
        self.table.record(combine([sequence], Event.COMBINE_PREFILL, "test"))
        self.table.record([self.table.prefilled(name)])
        self.scheduler.req_to_token_pool.alloc([request])
        kv_indices = self.allocator.alloc(pages * PAGE)
        self.row(request)[: len(kv_indices)] = kv_indices.to(torch.int32)
        request.kv = ReqKvInfo(kv_allocated_len=tokens, swa_evicted_seqlen=0)
        self.write(request, 0, tokens)
        return request

    def row(self, request: Any) -> torch.Tensor:
        return self.scheduler.req_to_token_pool.req_to_token[request.req_pool_idx]

    def write(self, request: Any, begin: int, end: int, *, plus: float = 0) -> None:
        for layer in range(LAYERS):
            for number, part in enumerate(self.pool.page_parts(layer)):
                for token in range(begin, end):
                    at = int(self.row(request)[token])
                    part[at // PAGE, at % PAGE] = 100 * layer + 50 * number + token + plus

    def content(self, request: Any) -> list[float]:
        """Return the KV of a request in the order of its tokens."""
        where = [int(at) for at in self.row(request)[: request.kv_committed_len]]
        parts = [part for layer in range(LAYERS) for part in self.pool.page_parts(layer)]
        return [float(part[at // PAGE, at % PAGE]) for part in parts for at in where]

    @property
    def free(self) -> tuple[int, int]:
        """Free pages of the pool, and of the account."""
        return len(self.allocator.free_list), self.table.ledger.free_pages


def copy_ahead(source: Rank, target: Rank, name: str, *, full_pages: int) -> None:
    wanted = EarlyCopy(sequence_id=name, source=0, target=1, full_pages=full_pages, pages=full_pages + 2, gap=0)
    into = target.ahead.keep(wanted)
    assert into is not None
    for sent, received in zip(source.ahead.read(wanted), into, strict=True):
        received.copy_(sent)


def send(export: Export, target: Rank) -> Refusal | None:
    """Let the target reserve, receive and adopt."""
    assert layout_fault(export.header, export.tensors) is None
    reservation = target.store.reserve(export.header)
    if isinstance(reservation, Refusal):
        return reservation
    assert layout_fault(export.header, reservation.tensors) is None
    for sent, received in zip(export.tensors, reservation.tensors, strict=True):
        received.copy_(sent)
    target.store.adopt(export.header, reservation)
    return None


@pytest.mark.parametrize("copied", [0, 1, 2])
def test_a_sequence_has_its_kv_in_order_however_many_pages_went_before_it(copied: int) -> None:
    source, target = Rank(), Rank()
    request = source.put("a", tokens=2 * PAGE)
    if copied:
        copy_ahead(source, target, "a", full_pages=copied)
        source.ahead.prepare(["a"])
    request.output_ids, request.kv_committed_len = array("q", [7, 8, 9]), 2 * PAGE + 2  # it has run on meanwhile
    source.write(request, 2 * PAGE, 2 * PAGE + 2)
    export = source.store.export("a")
    assert (export.header.pages_there, export.header.num_pages) == (copied, 3 - copied)
    assert send(export, target) is None
    arrived = target.table.request_named("a")
    assert target.content(arrived) == source.content(request)
    assert list(arrived.output_ids) == [7, 8, 9]
    assert target.free == (NUM_PAGES - 3, NUM_PAGES - 4), "4 pages are all that it can need"


def test_a_sequence_that_lost_its_kv_since_the_copy_sends_all_of_its_pages() -> None:
    source, target = Rank(), Rank()
    request = source.put("a", tokens=3 * PAGE)
    copy_ahead(source, target, "a", full_pages=3)
    request.kv = ReqKvInfo(kv_allocated_len=3 * PAGE, swa_evicted_seqlen=0)
    source.write(request, 0, 3 * PAGE, plus=0.5)  # computed anew with new weights
    source.ahead.prepare(["a"])
    export = source.store.export("a")
    assert export.header.pages_there == 0
    assert send(export, target) is None
    assert target.content(target.table.request_named("a")) == source.content(request)
    assert target.free[0] == NUM_PAGES - 3, "the stale copy is freed"


def test_a_copy_that_the_target_does_not_hold_is_not_counted_on() -> None:
    source, target = Rank(), Rank()
    source.put("a", tokens=3 * PAGE)
    copy_ahead(source, target, "a", full_pages=3)
    target.ahead.drop("a")
    assert target.free == (NUM_PAGES, NUM_PAGES)
    assert source.store.export("a").header.pages_there == 0, "the decision does not call it prepared"


def test_a_header_that_counts_on_a_copy_which_is_not_there_is_refused() -> None:
    source, target = Rank(), Rank()
    source.put("a", tokens=3 * PAGE)
    copy_ahead(source, Rank(), "a", full_pages=2)
    source.ahead.prepare(["a"])
    refusal = send(source.store.export("a"), target)
    assert refusal is not None
    assert refusal.reason.startswith("it lacks the copy of 2 pages")
    assert target.free == (NUM_PAGES, NUM_PAGES)


def test_a_copy_without_room_in_the_account_is_not_kept() -> None:
    target = Rank()
    target.table.ledger.reserve("others", NUM_PAGES - 4)
    wanted = EarlyCopy(sequence_id="a", source=0, target=1, full_pages=3, pages=5, gap=0)
    assert target.ahead.keep(wanted) is None
    assert target.free == (NUM_PAGES, 4)


@pytest.mark.parametrize("end", ["refused", "cancelled", "never offered"])
def test_a_prepared_move_that_fails_leaves_no_page_behind(end: str) -> None:
    source, target = Rank(), Rank()
    source.put("a", tokens=3 * PAGE)
    copy_ahead(source, target, "a", full_pages=3)
    source.ahead.prepare(["a"])
    header: SequenceHeader = source.store.export("a").header
    if end == "refused":
        target.table.ledger.reserve("other", 0)
        target.table.ledger.stall("other", 0)
        assert isinstance(target.store.reserve(header), Refusal)
    elif end == "cancelled":
        reservation = target.store.reserve(header)
        assert not isinstance(reservation, Refusal)
        target.store.cancel(header, reservation)
    target.ahead.drop_left(["a"])
    assert target.free == (NUM_PAGES, NUM_PAGES)
    assert "a" in source.table
