"""Owns a rank's store of sequences for migration: how a sequence is written down, taken in and released.

core/rank_agreement decides which sequences move. migration/ moves them, and decides who owns them meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sgl_batch.core.early_copies import EarlyCopy, HeldCopy
from sgl_batch.core.move_costs import MoveRates, RateMeter
from sgl_batch.core.page_ledger import pages_for
from sgl_batch.core.plan import Plan
from sgl_batch.core.rank_moves import Move
from sgl_batch.distributed.group_transport import GroupTransport
from sgl_batch.distributed.rank_context import RankContext
from sgl_batch.managers.boundary_executor import BoundaryExecutor
from sgl_batch.managers.pages_ahead import PagesAhead, page_views
from sgl_batch.metrics.counters import Counters
from sgl_batch.migration import messages, migrator
from sgl_batch.migration.early_copies import EarlyCopies, Taken
from sgl_batch.migration.endpoints import Endpoints
from sgl_batch.migration.header import SequenceHeader
from sgl_batch.migration.outcome import Result
from sgl_batch.migration.store import Export, Refusal, Reservation, SequenceStore
from sgl_batch.sglang_adapter import moving
from sgl_batch.sglang_adapter.moving_grammars import ArrivingGrammars
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch
from sgl_batch.sglang_adapter.types.requests import Request
from sgl_batch.sglang_adapter.types.scheduler import PagePool, SGLangScheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expected:
    """A sequence that may arrive: its request, and the KV indices of the pages that it will have."""

    request: Request
    kv_indices: torch.Tensor


def written_down(
    request: Request, pool: PagePool, *, num_pages: int, store_blocks: Sequence[int] = (), pages_there: int = 0
) -> SequenceHeader:
    """Return the header of a request whose KV is sent in pages, or lies in blocks of the store that all ranks share.

    `pages_there`: pages before these of which the receiver holds a copy.
    """
    return SequenceHeader(
        sequence_id=request.rid,
        prompt_tokens=list(request.origin_input_ids),
        generated_tokens=list(request.output_ids),
        seed=request.sampling_params.sampling_seed,
        sampling=moving.sampling_of(request),
        progress=moving.progress_of(request),
        position=request.kv_committed_len,
        num_pages=num_pages,
        num_layers=pool.layer_num,
        page_shapes=tuple(tuple(part.shape[1:]) for part in pool.page_parts(0)),
        page_dtype=str(pool.dtype).removeprefix("torch."),
        store_blocks=list(store_blocks),
        pages_there=pages_there,
    )


def request_of(header: SequenceHeader, scheduler: SGLangScheduler) -> Request:
    """Rebuild a request from its header. It holds no KV and has no grammar yet."""
    return moving.rebuild(
        scheduler,
        rid=header.sequence_id,
        prompt_tokens=header.prompt_tokens,
        generated_tokens=header.generated_tokens,
        sampling=header.sampling,
        progress=header.progress,
        position=header.position,
    )


class MovingSequences(SequenceStore, Protocol):
    """A rank's `SequenceStore` that prepares for the sequences that leave at a boundary."""

    def begin(self, leaving: list[str], running: ScheduleBatch) -> None:
        """Prepare for these sequences to leave the rank. `running`: its decode batch."""


class MovesInBothWays(MovingSequences, Protocol):
    """A `MovingSequences` in which sequences leave with their KV, or as tokens.

    `sent_tokens`: of how many tokens KV was exported since it was last set to 0.
    """

    sent_tokens: int

    def prepare(self, as_tokens: Collection[str]) -> None:
        """Note which of the sequences that leave at this boundary leave without KV."""


class Arrivals(Protocol):
    """What becomes of a rebuilt request: a sequence of the rank (`SequenceTable`), or a replica."""

    def expect(self, request: Request, plan: Plan) -> str | None:
        """Reserve pages for a request that may arrive. Where there is no room, return why, with the numbers."""

    def expect_no_more(self, name: str) -> None:
        """Free the pages of an expected request that does not arrive."""

    def adopt(self, request: Request) -> None:
        """Add a request that has arrived with its KV."""


class RankSequences:
    """The `SequenceStore` of a scheduler process whose KV lies on the device alone."""

    def __init__(
        self,
        scheduler: SGLangScheduler,
        executor: BoundaryExecutor,
        *,
        ahead: PagesAhead | None = None,
        arrivals: Arrivals | None = None,
    ) -> None:
        self._scheduler, self._executor, self._table = scheduler, executor, executor.table
        self._arrivals: Arrivals = executor.table if arrivals is None else arrivals
        self._pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        self._page_size: int = scheduler.page_size
        self._grammars = ArrivingGrammars(scheduler)
        self._ahead = ahead
        self._expected: dict[str, _Expected] = {}
        self._running: ScheduleBatch | None = None

    def begin(self, leaving: list[str], running: ScheduleBatch) -> None:
        self._running = running

    def export(self, sequence_id: str) -> Export:
        request = self._table.request_named(sequence_id)
        kv_indices = self._scheduler.req_to_token_pool.req_to_token[request.req_pool_idx, : request.kv_committed_len]
        there = 0 if self._ahead is None else self._ahead.num_there(sequence_id)
        tensors = list(page_views(self._pool, kv_indices[there * self._page_size :], self._page_size))
        num_pages = pages_for(request.kv_committed_len, self._page_size) - there
        header = written_down(request, self._pool, num_pages=num_pages, pages_there=there)
        return Export(header=header, tensors=tensors)

    def reserve(self, header: SequenceHeader) -> Reservation | Refusal:
        request = request_of(header, self._scheduler)
        allocator = self._scheduler.token_to_kv_pool_allocator
        kept = self._kept_for(header)
        if isinstance(kept, Refusal):
            return kept
        refusal = self._grammars.give(request) or self._arrivals.expect(request, self._executor.plan)
        if refusal is not None:
            allocator.free(kept)
            return Refusal(reason=refusal)
        sent = allocator.alloc(header.num_pages * self._page_size)
        assert sent is not None, "the page ledger has reserved pages that the allocator has free"
        kv_indices = torch.cat((kept, sent))
        self._expected[header.sequence_id] = _Expected(request=request, kv_indices=kv_indices)
        return Reservation(tensors=list(page_views(self._pool, sent, self._page_size)))

    def _kept_for(self, header: SequenceHeader) -> torch.Tensor | Refusal:
        """Return the KV indices of the copy that this rank holds of a sequence, int64; none if the sender sends all."""
        none = torch.empty(0, dtype=torch.int64, device=self._scheduler.device)
        kept = none if self._ahead is None else self._ahead.take(header.sequence_id)
        if len(kept) == header.pages_there * self._page_size:
            return kept
        self._scheduler.token_to_kv_pool_allocator.free(kept)
        if header.pages_there:
            return Refusal(reason=f"it lacks the copy of {header.pages_there} pages, and has {len(kept)} tokens")
        return none

    def adopt(self, header: SequenceHeader, reservation: Reservation) -> None:
        expected = self._expected.pop(header.sequence_id)
        moving.attach(self._scheduler, expected.request, expected.kv_indices[: header.position])
        self._arrivals.adopt(expected.request)

    def cancel(self, header: SequenceHeader, reservation: Reservation) -> None:
        expected = self._expected.pop(header.sequence_id)
        self._scheduler.token_to_kv_pool_allocator.free(expected.kv_indices)
        self._arrivals.expect_no_more(header.sequence_id)

    def release(self, sequence_id: str) -> None:
        request = self._table.request_named(sequence_id)
        if self._table.is_running(sequence_id):
            assert self._running is not None, "`begin` is called before sequences leave"
            moving.remove_from_batch(self._running, request)
        moving.release(self._scheduler, request)
        self._table.depart(sequence_id)


class RankMigration:
    """Carries out the moves of a boundary on this rank, and the copies that prepare later ones.

    `ahead`: the pages of these copies; None where no page is sent to another rank.
    """

    def __init__(
        self,
        rank_context: RankContext,
        store: MovesInBothWays,
        counters: Counters,
        *,
        backend: str,
        step_timeout_s: float,
        ahead: PagesAhead | None = None,
    ) -> None:
        self._store, self._counters, self._ahead = store, counters, ahead
        self._meter = RateMeter()
        self._rank, self._boundary = rank_context.rank, 0

        def transport(name: str) -> GroupTransport:
            group = rank_context.process_group(name, backend)
            return GroupTransport(group, range(rank_context.topology.num_ranks), through_host=backend == "gloo")

        ends = Endpoints(
            transport=transport("pages"),
            channel=rank_context.channel("migration", messages.Message),
            store=store,
            step_timeout_s=step_timeout_s,
        )
        self._migrator = migrator.Migrator(ends)
        self._copies = None
        if ahead is not None:
            self._copies = EarlyCopies(rank_context.channel("copies", Taken), transport("copied pages"), ahead)

    @property
    def sends_pages(self) -> bool:
        """Whether sequences move with their pages, and not by reference to a store that the ranks share."""
        return self._ahead is not None

    @property
    def held(self) -> list[HeldCopy]:
        """The copies that this rank holds of sequences of other ranks."""
        return [] if self._copies is None else self._copies.held

    @property
    def rates(self) -> MoveRates:
        """How fast this rank sends KV and computes it, as measured so far."""
        return self._meter.rates

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Note that a prefill of `tokens` took `seconds`."""
        self._meter.note_computed(tokens, seconds)

    def advance(self) -> None:
        """Let the copies that run beside the steps go on. This does not wait."""
        if self._copies is not None and not self._copies.is_idle:
            self._copies.advance()

    def copy(self, copies: list[EarlyCopy]) -> None:
        """Begin copies, as all ranks do."""
        if copies and self._copies is not None and self._ahead is not None:
            self._ahead.forget_read()
            self._copies.begin(copies)

    def drop_copies(self) -> None:
        """Drop all copies that this rank holds."""
        if self._copies is not None:
            self._copies.drop_all_but(())

    def run(self, moves: list[Move], running: ScheduleBatch) -> int:
        """Make these moves, as all ranks do; return how many sequences arrived. Raises MigrationFailed.

        Copies whose sequences do not move are dropped.
        """
        began = time.perf_counter()
        if self._copies is not None and self._ahead is not None:
            prepared = [move.sequence_id for move in moves if move.prepared]
            self._copies.drop_all_but(prepared)
            self._ahead.prepare(prepared)
        if not moves:
            return 0
        self._boundary += 1
        self._store.prepare([move.sequence_id for move in moves if move.as_tokens and move.source == self._rank])
        self._store.begin([move.sequence_id for move in moves if move.source == self._rank], running)
        report = self._migrator.run(self._boundary, moves)
        if self._ahead is not None:
            self._ahead.drop_left([move.sequence_id for move in moves])
        seconds = time.perf_counter() - began
        if self._store.sent_tokens:
            self._meter.note_sent(self._store.sent_tokens, seconds)
            self._store.sent_tokens = 0
        self._counters.add("moves_us", round(1e6 * seconds))
        return sum(outcome.result is Result.ADOPTED for outcome in report.outcomes)
