"""Owns copies between a GPU's pages and the store: the contract of copy_engine.py over pinned memory and side streams.

Not yet run on a GPU: its order, bounds and errors are tested on a CPU, with streams that the test advances. page_copies
owns which bytes go where.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from sgl_batch.errors import ConfigError
from sgl_batch.kv_offload.copy_engine import CopyCounters
from sgl_batch.kv_offload.host_kv_store import HostKVStore, Indices, as_indices
from sgl_batch.kv_offload.page_copies import FusedPageCopy, PageCopies, PerPageCopy
from sgl_batch.kv_offload.store_errors import CopyError, StoreFault, faults
from sgl_batch.kv_offload.store_geometry import PagedPool
from sgl_batch.memory.pinned_memory import pin, unpin

MAX_TICKETS = 64
_POLL_S = 50e-6
_BEFORE_COMPUTE = -1  # CUDA priority: lower numbers run first; compute has 0


class DeviceEvent(Protocol):
    """A point in a stream, such as torch.cuda.Event."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class DeviceStreams(Protocol):
    """A copy stream for each direction, apart from the computing stream, and the host memory that they copy."""

    def pin(self, memory: torch.Tensor, block_bytes: int) -> None:
        """Let the device read and write host memory of whole blocks by itself. No copy spans two blocks."""

    def unpin(self, memory: torch.Tensor, block_bytes: int) -> None: ...

    def follow(self, to_store: bool, others: Iterable[DeviceEvent]) -> AbstractContextManager[Any]:
        """Inside, copies wait for `others` and for all that the computing stream was given so far."""

    def mark(self, to_store: bool) -> DeviceEvent:
        """Return the event behind all that the direction's stream was given so far."""

    def compute_waits(self, event: DeviceEvent) -> None:
        """Let all that the computing stream is given from now on wait for `event`. The host does not wait."""


class CudaStreams:
    """DeviceStreams of torch's current GPU."""

    def __init__(self) -> None:
        # A copy has few programs: they start as soon as any thread block of a kernel that fills the GPU has ended.
        self._streams = {to_store: torch.cuda.Stream(priority=_BEFORE_COMPUTE) for to_store in (False, True)}

    def pin(self, memory: torch.Tensor, block_bytes: int) -> None:
        pin(memory, "the host KV store (--kv-store-bytes)", "name a smaller store", unit_bytes=block_bytes)

    def unpin(self, memory: torch.Tensor, block_bytes: int) -> None:
        unpin(memory, unit_bytes=block_bytes)

    def follow(self, to_store: bool, others: Iterable[DeviceEvent]) -> AbstractContextManager[Any]:
        stream = self._streams[to_store]
        stream.wait_stream(torch.cuda.current_stream())
        for event in others:
            assert isinstance(event, torch.cuda.Event)
            stream.wait_event(event)
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def mark(self, to_store: bool) -> DeviceEvent:
        event: torch.cuda.Event = self._streams[to_store].record_event()
        return event

    def compute_waits(self, event: DeviceEvent) -> None:
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream().wait_event(event)


class CudaTicket:
    """A Ticket of CudaCopyEngine, which releases its blocks when a call finds that the copy has ended."""

    def __init__(
        self, engine: CudaCopyEngine, event: DeviceEvent, to_store: bool, pages: torch.Tensor, blocks: torch.Tensor
    ):
        self._engine, self.event, self.to_store, self.blocks = engine, event, to_store, blocks
        self.page_set, self.block_set = frozenset(pages.tolist()), frozenset(blocks.tolist())
        self.ended = False
        self.error: str | None = None

    @property
    def done(self) -> bool:
        self._engine.poll(self)
        return self.ended

    def wait(self, timeout_s: float | None = None) -> None:
        self._engine.wait(self, timeout_s)
        if self.error is not None:
            raise CopyError(self.error)

    def device_waits(self) -> None:
        if not self.ended:
            self._engine.device_waits(self)

    def cancel(self) -> bool:
        """Return False: a stream keeps the work that it was given."""
        return False


class CudaCopyEngines:
    """The copy engines of a store, which share its pinned memory and two streams. Pinning claims all the memory now."""

    def __init__(self, store: HostKVStore, streams: DeviceStreams | None = None) -> None:
        if store.geometry.checksums:
            raise ConfigError("--kv-store-checksums works with pages in RAM only: start without it on a GPU")
        self._store = store
        self._streams = CudaStreams() if streams is None else streams
        self._memory: torch.Tensor | None = store.memory()
        self._streams.pin(self._memory, store.geometry.block_bytes)

    def engine_for(self, pool: PagedPool, *, max_tickets: int = MAX_TICKETS) -> CudaCopyEngine:
        """Return an engine for the pages of a pool. `max_tickets`: how many copies may be under way."""
        assert self._memory is not None, "the engines are not closed"
        geometry = self._store.geometry
        blocks = self._memory.view(self._store.num_blocks, geometry.block_bytes)
        parts = [
            [part.flatten(1).view(torch.uint8) for part in pool.page_parts(layer)] for layer in range(pool.layer_num)
        ]
        by_kernel = parts[0][0].is_cuda and FusedPageCopy.serves(geometry)
        copies = FusedPageCopy(parts, blocks, geometry) if by_kernel else PerPageCopy(parts, blocks, geometry)
        shape = len(parts), len(parts[0][0])
        return CudaCopyEngine(self._store, copies, self._streams, shape, max_tickets=max_tickets)

    def close(self) -> None:
        """Unpin the memory. The caller has closed all engines. A second call does nothing."""
        if self._memory is not None:
            self._streams.unpin(self._memory, self._store.geometry.block_bytes)
            self._memory = None


class CudaCopyEngine:
    """A CopyEngine that one thread calls. `shape`: the layers and pages of its pool."""

    def __init__(
        self,
        store: HostKVStore,
        copies: PageCopies,
        streams: DeviceStreams,
        shape: tuple[int, int],
        *,
        max_tickets: int,
    ) -> None:
        self._store, self._copies, self._streams, self._max_tickets = store, copies, streams, max_tickets
        self._num_layers, self._num_pages = shape
        self._closed = False
        self._live: list[CudaTicket] = []
        self._counts = dict.fromkeys(
            ("stored_bytes", "loaded_bytes", "stored_pages", "loaded_pages", "tickets", "errors"), 0
        )
        self._submit_wait_s = self._ticket_wait_s = 0.0

    def store_pages(self, layers: range, device_pages: Indices, blocks: Indices) -> CudaTicket:
        return self._submit(True, layers, as_indices(device_pages), as_indices(blocks))

    def load_pages(self, layers: range, blocks: Indices, device_pages: Indices) -> CudaTicket:
        return self._submit(False, layers, as_indices(device_pages), as_indices(blocks))

    def _submit(self, to_store: bool, layers: range, pages: torch.Tensor, blocks: torch.Tensor) -> CudaTicket:
        self._check(to_store, layers, pages, blocks)
        begun = time.perf_counter()
        while len(self._live) >= self._max_tickets:
            self._finish(self._live[0], wait=True)
        self._submit_wait_s += time.perf_counter() - begun
        with faults():
            self._store.handle.begin_copies(blocks, to_store)
        try:
            with self._streams.follow(to_store, self._before(to_store, pages, blocks)):
                self._copies(to_store, layers, pages, blocks)
            event = self._streams.mark(to_store)
        except RuntimeError as error:
            self._store.handle.end_copies(blocks)
            self._counts["errors"] += 1
            raise CopyError(f"the GPU refuses a copy of {len(pages)} pages, layers {layers}: {error}") from error
        ticket = CudaTicket(self, event, to_store, pages, blocks)
        self._live.append(ticket)
        way = "stored" if to_store else "loaded"
        self._counts["tickets"] += 1
        self._counts[f"{way}_pages"] += len(pages)
        self._counts[f"{way}_bytes"] += len(pages) * len(layers) * sum(self._store.geometry.part_bytes)
        return ticket

    def _check(self, to_store: bool, layers: range, pages: torch.Tensor, blocks: torch.Tensor) -> None:
        if self._closed:
            raise StoreFault("the copy engine is closed")
        if layers.step != 1 or layers.start < 0 or layers.stop > self._num_layers:
            raise StoreFault(f"{layers} is no span of the {self._num_layers} layers")
        if len(pages) != len(blocks):
            raise StoreFault(f"{len(pages)} device pages and {len(blocks)} blocks")
        if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < self._num_pages:
            raise StoreFault(f"device pages {int(pages.min())} to {int(pages.max())} of {self._num_pages}")
        targets = (blocks if to_store else pages).tolist()
        if len(set(targets)) != len(targets):
            raise StoreFault(f"a target stands twice in one copy, among {targets}")

    def _before(self, to_store: bool, pages: torch.Tensor, blocks: torch.Tensor) -> list[DeviceEvent]:
        """Return the events of the other stream that a copy must wait for. Each stream keeps its own order."""
        page_set, block_set = frozenset(pages.tolist()), frozenset(blocks.tolist())
        return [
            ticket.event
            for ticket in self._live
            if ticket.to_store != to_store and (page_set & ticket.page_set or block_set & ticket.block_set)
        ]

    def poll(self, ticket: CudaTicket) -> None:
        """End the ticket if its copies have ended."""
        self._finish(ticket, wait=False)

    def device_waits(self, ticket: CudaTicket) -> None:
        """As Ticket.device_waits."""
        self._streams.compute_waits(ticket.event)

    def wait(self, ticket: CudaTicket, timeout_s: float | None) -> None:
        """As Ticket.wait, without raising the copy's error."""
        begun = time.perf_counter()
        self._finish(ticket, wait=timeout_s is None)
        while not ticket.ended:
            if timeout_s is not None and time.perf_counter() - begun > timeout_s:
                self._ticket_wait_s += time.perf_counter() - begun
                raise TimeoutError(f"the copy has not ended in {timeout_s} s")
            time.sleep(_POLL_S)  # CUDA has no wait with a time limit
            self._finish(ticket, wait=False)
        self._ticket_wait_s += time.perf_counter() - begun

    def _finish(self, ticket: CudaTicket, *, wait: bool) -> None:
        if ticket.ended:
            return
        try:
            if wait:
                ticket.event.synchronize()
            elif not ticket.event.query():
                return
        except RuntimeError as error:
            ticket.error = f"the GPU reports an error after a copy of {len(ticket.blocks)} pages: {error}"
            self._counts["errors"] += 1
        self._store.handle.end_copies(ticket.blocks)
        self._live.remove(ticket)
        ticket.ended = True

    def counters(self) -> CopyCounters:
        """Return what was done so far. Bytes and pages are those given to the GPU; its busy time is not known here."""
        return CopyCounters(
            **self._counts,
            cancelled=0,
            busy_s=0.0,
            submit_wait_s=self._submit_wait_s,
            ticket_wait_s=self._ticket_wait_s,
        )

    def close(self) -> None:
        self._closed = True
        for ticket in list(self._live):
            self._finish(ticket, wait=True)
