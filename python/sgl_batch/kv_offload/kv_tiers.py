"""Owns a rank's two tiers of KV together: device pages, store blocks, and the staging between them, by request.

It does not decide which requests move, or when. The package's docstring says how the tiers work together.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import torch

from sgl_batch.config import MemoryConfig
from sgl_batch.core.page_ledger import PageLedger, pages_for
from sgl_batch.core.prefixes import PrefixMatch, PrefixPage
from sgl_batch.distributed.rank_context import RankContext
from sgl_batch.errors import ConfigError
from sgl_batch.kv_offload.copy_engine import CopyEngines, Ticket
from sgl_batch.kv_offload.cuda_copy_engine import CudaCopyEngines
from sgl_batch.kv_offload.decode_staging import DecodeStaging, PartCopies
from sgl_batch.kv_offload.host_kv_store import HostKVStore, StoreAddress
from sgl_batch.kv_offload.leased_store import LeasedStore
from sgl_batch.kv_offload.native_copy_engine import NativeCopyEngines
from sgl_batch.kv_offload.prefill_staging import PrefillStaging
from sgl_batch.kv_offload.store_geometry import StoreGeometry
from sgl_batch.kv_offload.stored_kv import StoredKV
from sgl_batch.kv_offload.streamed_rows import StreamedRows
from sgl_batch.metrics.counters import Counters
from sgl_batch.model_executor.layer_runner import LayerRunner
from sgl_batch.sglang_adapter.host_copies import upload, upload_copy
from sgl_batch.sglang_adapter.scheduling import tokens_written
from sgl_batch.sglang_adapter.types.requests import Request
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler

# Enough to keep a link busy for milliseconds.
_RATE_PAGES = 64


def open_store(geometry: StoreGeometry, memory: MemoryConfig, rank_context: RankContext | None) -> HostKVStore:
    """Open this engine's store: the first attention rank creates it, and the others join it.

    Raises ConfigError if there is no room for it, or fewer blocks than ranks.
    """
    num_ranks, rank = (
        (1, 0) if rank_context is None else (rank_context.topology.num_attention_ranks, rank_context.attention_rank)
    )
    if rank_context is not None and rank > 0:
        maker = rank_context.topology.rank_of_attention(0)
        published = rank_context.await_published("kv-store", [maker])[maker]
        return HostKVStore.join(StoreAddress(**json.loads(published)), geometry, rank=rank)
    store = HostKVStore.create(
        geometry,
        num_bytes=memory.kv_store_bytes,
        num_ranks=num_ranks,
        directory=None if memory.kv_store_dir is None else Path(memory.kv_store_dir),
    )
    if store.num_blocks < num_ranks:
        raise ConfigError(
            f"a host KV store of {memory.kv_store_bytes} bytes (--kv-store-bytes) holds {store.num_blocks} pages of "
            f"{geometry.block_bytes} bytes, fewer than one for each of {num_ranks} ranks: name a larger store"
        )
    if rank_context is not None:
        rank_context.rendezvous.publish("kv-store", rank_context.rank, json.dumps(asdict(store.address)))
    return store


def copy_engines(store: HostKVStore, device: str, memory: MemoryConfig) -> CopyEngines:
    """Return the copy engines of a store for a device. Raises ConfigError if the store's memory cannot be pinned."""
    if torch.device(device).type == "cpu":
        return NativeCopyEngines(store, num_workers=memory.kv_copy_threads)
    return CudaCopyEngines(store)


@dataclass(frozen=True, slots=True, kw_only=True)
class Returning:
    """A sequence whose KV is being copied to device `pages` [P], int64 on the host."""

    request: Request
    pages: torch.Tensor
    ticket: Ticket


class KVTiers:
    """One rank's device pages, store blocks, copy engine and stagings. One thread calls it.

    The caller makes it after the scheduler's pools, reserves device pages and blocks in its ledgers before each call,
    and calls `close` at the end.

    `share`: how many blocks of the store this rank may hold at first: an equal part. Boundaries change that (`leased`),
    so that no rank asks another before it takes blocks.
    `stored`: the blocks of each sequence.
    """

    def __init__(
        self,
        scheduler: SGLangScheduler,
        runner: LayerRunner | None,
        memory: MemoryConfig,
        counters: Counters,
        rank_context: RankContext | None,
    ) -> None:
        """Open the store and make the stagings.

        Args:
            scheduler: its pools, allocator and page size must exist.
            runner: the layer runner, through which prompts are staged and decode KV is streamed. None for a model
                without an adapter: its prompts are computed in device pages, and the store is exclusive.
            memory: the sizes and modes of the store.
            counters: where copies and waits are counted.
            rank_context: this rank among the engine's ranks; None if there is one rank.

        Raises:
            ConfigError: the model's pool has no pages that the store can hold, or the store cannot be opened.
        """
        self._scheduler, self._runner, self._counters = scheduler, runner, counters
        self._allocator, self._device = scheduler.token_to_kv_pool_allocator, scheduler.device
        self._pool = self._allocator.get_kvcache()
        self._page_size: int = scheduler.page_size
        if not hasattr(self._pool, "page_parts"):
            raise ConfigError(
                f"kv_store_bytes is {memory.kv_store_bytes}; this model keeps its KV in {type(self._pool).__name__}, "
                "whose pages the host KV store cannot hold: start without a store"
            )
        self._store = open_store(
            StoreGeometry.of_pool(self._pool, checksums=memory.kv_store_checksums), memory, rank_context
        )
        self.share = self._store.num_blocks // self._store.num_ranks
        self._engines = copy_engines(self._store, self._device, memory)
        self._engine = self._engines.engine_for(self._pool)
        self.stored = StoredKV(
            self._store,
            self._engine,
            page_size=self._page_size,
            layers=self._pool.layer_num,
            leased=self.share,
            counters=counters,
            exclusive=self._is_exclusive(memory),
        )
        first_page = self._allocator.first_staged
        self._staging = PrefillStaging(self._store, self._pool, self._engines, first_page=first_page)
        self._decode_staging = DecodeStaging(self._pool, self._engines, first_page=first_page)
        self._group: list[tuple[Request, int, PrefixMatch, torch.Tensor]] = []
        self._restored: list[int] = []
        self._on_device: dict[PrefixPage, int] = {}

    @property
    def stages_prompts(self) -> bool:
        """Whether prompts can be computed in staged pages on their way to the store."""
        return self._runner is not None

    @property
    def _layer_runner(self) -> LayerRunner:
        assert self._runner is not None, "the layer runner alone stages prompts and streams decode KV"
        return self._runner

    def _is_exclusive(self, memory: MemoryConfig) -> bool:
        """Whether the store is exclusive.

        An inclusive store no larger than the device would hold nothing that the device cannot. It needs prompts staged,
        because it holds all of them. Streamed decode needs an inclusive store.
        """
        if not self.stages_prompts:
            return True
        small = self.share <= self._allocator.size // self._page_size
        asked = memory.kv_store_mode
        return asked == "exclusive" or (asked == "auto" and small and memory.decode_kv != "streamed")

    @property
    def pool_blocks(self) -> int:
        """Blocks of the store, if several ranks share it; else 0."""
        return self._store.num_blocks if self._store.num_ranks > 1 else 0

    def leased(self, account: PageLedger | None) -> LeasedStore | None:
        """Return this rank's lease of a store that several ranks share; None where it has the store for itself.

        `account`: the account of admission, if it counts blocks of the store.
        """
        total = self.pool_blocks
        return LeasedStore(self.stored, total=total, account=account) if total else None

    @property
    def pool_bytes(self) -> int:
        """Bytes that all device pages take in the store."""
        return self._allocator.size // self._page_size * self._store.geometry.block_bytes

    def copy_rate(self) -> float:
        """Measure the rate of copies from the store to the device, in bytes a second.

        Called before there is any sequence, because it overwrites device pages. Raises CopyError.
        """
        num_pages = min(_RATE_PAGES, self.share, self._allocator.size // self._page_size)
        return self.stored.copy_rate(torch.arange(1, num_pages + 1))

    def store_state(self) -> dict[str, int]:
        """Return the blocks of the store, how many are free, and the bytes of one; of all ranks together."""
        counts, block_bytes = self._store.counts(), self._store.geometry.block_bytes
        return {
            "total_pages": self._store.num_blocks,
            "free_pages": counts.free,
            "page_bytes": block_bytes,
            "exclusive": int(self.stored.exclusive),
        }

    def _pages(self, tokens: int) -> int:
        return pages_for(tokens, self._page_size)

    # Prefill.

    def staging(self) -> AbstractContextManager[None]:
        """Inside, the allocator gives KV indices of staged pages."""
        return self._allocator.staging()

    def stage_prefixes(self, requests: list[Request], matches: list[PrefixMatch]) -> dict[PrefixPage, int]:
        """Reserve the first staged pages for what prompts of the coming group have in the store already.

        These are pages that they share with living sequences, and the own pages of a prompt that is computed in part.
        Called inside `staging`, before the batch is made; `begin_prefill` starts the copies.

        Args:
            requests: the group, in the order of its rows.
            matches: the pages that each prompt shares.

        Returns:
            By shared page, its staged page.
        """
        shared = [page for match in matches for page in match.found if page.has_kv_location]
        begun = {
            request: self.stored.store_blocks_of(request.rid) for request in requests if request.rid in self.stored
        }
        self._restored = list(dict.fromkeys(chain((page.kv_location for page in shared), *begun.values())))
        kv_indices = self._allocator.alloc(len(self._restored) * self._page_size)
        assert kv_indices is not None, "staged pages do not run out"
        pages = dict(zip(self._restored, kv_indices.view(-1, self._page_size), strict=True))
        for request, own in begun.items():
            request.prefix_indices = torch.cat([pages[block] for block in own])
        self._counters.add("prefix_pages_restored", len(set(shared)))
        return {page: int(pages[page.kv_location][0]) // self._page_size for page in shared}

    def begin_prefill(self, requests: list[Request], matches: list[PrefixMatch]) -> None:
        """Prepare the next forward pass to prefill these requests, whose KV indices were given inside `staging`.

        Takes the blocks of their new pages. The caller runs the pass and then calls `end_prefill`.
        """
        tokens = [request.kv_committed_len for request in requests]
        lengths = [request.extend_range.length for request in requests]
        blocks = self.stored.take(sum(self._pages(length) for length in lengths))
        self._staging.begin(lengths, blocks, restored=torch.tensor(self._restored, dtype=torch.int64))
        parts = blocks.split([self._pages(length) for length in lengths])
        for request, match, part in zip(requests, matches, parts, strict=True):
            first = request.extend_range.start // self._page_size
            for page, block in zip(match.pages[max(first, match.shared) :], part.tolist(), strict=False):
                page.kv_location = block
        self._group = list(zip(requests, tokens, matches, parts, strict=True))
        self._layer_runner.prefill_sink = self._staging

    def end_prefill(self) -> None:
        """End the prefill pass: wait for its copies, after which all prompts are in the store. Raises CopyError."""
        waited = self._staging.waited_s
        self._layer_runner.prefill_sink = None
        self._staging.end()
        self._counters.add("staging_wait_us", round(1e6 * (self._staging.waited_s - waited)))
        self._counters.counts["staging_peak_bytes"] = self._staging.peak_bytes
        self._counters.counts["staging_peak_pages"] = self._staging.peak_pages
        for request, tokens, match, blocks in self._group:
            if request.rid in self.stored:
                self.stored.extend(request.rid, blocks, tokens)
            else:
                self.stored.adopt(request.rid, blocks, tokens, shared=[page.kv_location for page in match.found])
        self._group = []

    # Decode.

    def write_through(self, requests: list[Request]) -> None:
        """Begin to copy to the store the pages that the last step of these requests has filled. Does not wait."""
        self.stored.send_known()
        full = [request for request in requests if tokens_written(request) % self._page_size == 0]
        if full and not self.stored.exclusive:
            last = [tokens_written(request) - 1 for request in full]
            self.stored.write_through([request.rid for request in full], self._pages_at(full, last))

    def decoding_staged(self) -> AbstractContextManager[None]:
        """Inside, the allocator gives decode steps KV indices of streamed pages."""
        return self._allocator.decoding_staged()

    def streamed_rows(self) -> StreamedRows:
        """Return the layout of decode steps whose KV is streamed through all device pages."""
        return StreamedRows(
            self._scheduler,
            self.stored,
            page_size=self._page_size,
            first_page=self._allocator.first_staged,
            half_pages=self._decode_staging.half_pages,
        )

    def begin_streamed_step(self, copies: list[PartCopies]) -> None:
        """Prepare a decode step with these copies as the next pass. The caller then calls `end_streamed_step`."""
        self._decode_staging.begin(copies)
        self._layer_runner.decode_source = self._decode_staging

    def end_streamed_step(self) -> None:
        """End the streamed step: wait for its copies, after which all KV is in the store. Raises CopyError."""
        staging = self._decode_staging
        self._layer_runner.decode_source = None
        staging.end()
        self.stored.written()
        self._counters.counts["pages_streamed"] = staging.pages_brought
        self._counters.counts["stream_wait_us"] = round(1e6 * staging.waited_s)

    def suspend(self, requests: list[Request]) -> None:
        """Copy to the store what it lacks of these requests' KV, and wait. Their device pages stay theirs."""
        table, size = self._scheduler.req_to_token_pool.req_to_token, self._page_size
        tokens = [request.kv_committed_len for request in requests]
        pages = [
            table[request.req_pool_idx, :length:size].to(torch.int64) // size
            for request, length in zip(requests, tokens, strict=True)
        ]
        self.stored.suspend([request.rid for request in requests], pages, tokens)

    def _pages_at(self, requests: list[Request], positions: list[int]) -> torch.Tensor:
        """Return the device page [N] that holds each request's KV of one position."""
        table: torch.Tensor = self._scheduler.req_to_token_pool.req_to_token
        held = [request.req_pool_idx for request in requests if request.req_pool_idx is not None]
        rows, columns = (upload(numbers, torch.int64, table.device) for numbers in (held, positions))
        return table[rows, columns].to(torch.int64) // self._page_size

    def restore(self, request: Request, prompt: Sequence[PrefixPage]) -> Returning:
        """Take device pages for a request's KV, and begin to copy to them what the device lacks.

        The caller has reserved the pages. It waits for the ticket, and then calls `stored.restored`.

        Args:
            request: a request whose KV is in the store.
            prompt: its first pages, of which others may have some on the device already; those are not copied again.

        Returns:
            The request with its pages, in their order, and the ticket of the copy.

        Raises:
            StoreFault: the store refuses the copy.
        """
        there = [page in self._on_device for page in prompt]
        num_new = self._pages(self.stored.tokens_of(request.rid)) - sum(there)
        kv_indices = self._allocator.alloc(num_new * self._page_size)
        assert kv_indices is not None, f"{num_new} pages were reserved for {request.rid}"
        new = iter((kv_indices[:: self._page_size] // self._page_size).tolist())
        for page in prompt:
            if page not in self._on_device:
                self._on_device[page] = next(new)
        pages = torch.tensor([*(self._on_device[page] for page in prompt), *new], dtype=torch.int64)
        self._counters.add("prompt_pages_found_on_device", sum(there))
        ticket = self.stored.restore(request.rid, pages, there=there)
        return Returning(request=request, pages=pages, ticket=ticket)

    def drop(self, prompt: Sequence[PrefixPage]) -> None:
        """Free the device pages of these prompt pages, which no sequence on the device holds any more."""
        pages = upload([self._on_device.pop(page) for page in prompt], torch.int64, self._device)
        self._allocator.free(pages * self._page_size)

    def token_indices_of(self, name: str, pages: torch.Tensor) -> torch.Tensor:
        """Return the KV indices [tokens], on the device, of a sequence whose KV is restored to device `pages` [P]."""
        kv_indices = (pages[:, None] * self._page_size + torch.arange(self._page_size)).flatten()
        return upload_copy(kv_indices[: self.stored.tokens_of(name)], self._device)

    def close(self) -> None:
        """Close the stagings and copy engines, then leave the store. No pass is running."""
        self._staging.close()
        self._decode_staging.close()
        self._engine.close()
        self._engines.close()
        self._store.close()
