"""Owns copies between a GPU's pages and the store: the contract of copy_engine.py over pinned memory and side streams.

This has not run on a GPU yet: its order, its bounds and its errors are tested on a CPU, with streams that the test
advances. What a copy costs there is not known: every part of every page is one call of torch's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from sgl_batch.errors import ConfigError
from sgl_batch.mem_cache.copy_engine import CopyCounters
from sgl_batch.mem_cache.host_kv_store import HostKVStore, Indices, as_indices
from sgl_batch.mem_cache.store_errors import CopyError, StoreFault, faults
from sgl_batch.mem_cache.store_geometry import PagedPool

MAX_TICKETS = 64
_POLL_S = 50e-6


class DeviceEvent(Protocol):
    """A point in a stream, as torch.cuda.Event."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class DeviceStreams(Protocol):
    """Two streams beside the one that computes, one for each direction, and memory that they copy from and to."""

    def pin(self, memory: torch.Tensor) -> None:
        """Make host memory one that the device reads and writes by itself."""

    def unpin(self, memory: torch.Tensor) -> None: ...

    def follow(self, to_slots: bool, others: Iterable[DeviceEvent]) -> AbstractContextManager[Any]:
        """Copies within wait for these, and for what the computing stream has been given so far."""

    def mark(self, to_slots: bool) -> DeviceEvent:
        """What the stream has been given so far."""


class CudaStreams:
    """DeviceStreams of torch's current GPU."""

    def __init__(self) -> None:
        self._streams = {to_slots: torch.cuda.Stream() for to_slots in (False, True)}

    def pin(self, memory: torch.Tensor) -> None:
        fault = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(fault) != 0:
            raise ConfigError(
                f"the GPU's driver does not pin the {memory.nbytes} bytes of the host KV store (--kv-store-bytes): "
                f"{fault}; lift the limit on locked memory (ulimit -l) or name a smaller store"
            )

    def unpin(self, memory: torch.Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def follow(self, to_slots: bool, others: Iterable[DeviceEvent]) -> AbstractContextManager[Any]:
        stream = self._streams[to_slots]
        stream.wait_stream(torch.cuda.current_stream())
        for event in others:
            assert isinstance(event, torch.cuda.Event)
            stream.wait_event(event)
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def mark(self, to_slots: bool) -> DeviceEvent:
        event: torch.cuda.Event = self._streams[to_slots].record_event()
        return event


class CudaTicket:
    """A Ticket of CudaCopyEngine. It is the engine that lets go of its slots, when somebody sees that it has ended."""

    def __init__(
        self, engine: CudaCopyEngine, event: DeviceEvent, to_slots: bool, pages: torch.Tensor, slots: torch.Tensor
    ):
        self._engine, self.event, self.to_slots, self.slots = engine, event, to_slots, slots
        self.page_set, self.slot_set = frozenset(pages.tolist()), frozenset(slots.tolist())
        self.ended = False
        self.error: str | None = None

    @property
    def done(self) -> bool:
        self._engine.look(self)
        return self.ended

    def wait(self, timeout_s: float | None = None) -> None:
        self._engine.wait(self, timeout_s)
        if self.error is not None:
            raise CopyError(self.error)

    def cancel(self) -> bool:
        """Never: a stream cannot be asked to leave out what it has been given."""
        return False


class CudaCopyEngine:
    """A CopyEngine for one thread. Pinning claims all of the store's memory at the start."""

    def __init__(
        self,
        store: HostKVStore,
        pool: PagedPool,
        *,
        max_tickets: int = MAX_TICKETS,
        streams: DeviceStreams | None = None,
    ) -> None:
        if store.geometry.checksums:
            raise ConfigError("--kv-store-checksums works with pages in RAM only: start without it on a GPU")
        self._store, self._max_tickets = store, max_tickets
        self._streams = CudaStreams() if streams is None else streams
        self._memory: torch.Tensor | None = store.memory()
        self._slots = self._memory.view(store.num_slots, store.geometry.slot_bytes)
        # [layer][part], each uint8 [num_pages, bytes].
        self._parts = [
            [part.flatten(1).view(torch.uint8) for part in pool.page_parts(layer)] for layer in range(pool.layer_num)
        ]
        self._num_pages = len(self._parts[0][0])
        self._live: list[CudaTicket] = []
        self._counts = dict.fromkeys(
            ("stored_bytes", "loaded_bytes", "stored_pages", "loaded_pages", "tickets", "errors"), 0
        )
        self._submit_wait_s = self._ticket_wait_s = 0.0
        self._streams.pin(self._memory)

    def store_pages(self, layers: range, device_pages: Indices, slots: Indices) -> CudaTicket:
        return self._submit(True, layers, as_indices(device_pages), as_indices(slots))

    def load_pages(self, layers: range, slots: Indices, device_pages: Indices) -> CudaTicket:
        return self._submit(False, layers, as_indices(device_pages), as_indices(slots))

    def _submit(self, to_slots: bool, layers: range, pages: torch.Tensor, slots: torch.Tensor) -> CudaTicket:
        self._check(to_slots, layers, pages, slots)
        begun = time.perf_counter()
        while len(self._live) >= self._max_tickets:
            self._finish(self._live[0], wait=True)
        self._submit_wait_s += time.perf_counter() - begun
        with faults():
            self._store.handle.begin_copies(slots, to_slots)
        pairs = list(zip(pages.tolist(), slots.tolist(), strict=True))
        try:
            with self._streams.follow(to_slots, self._before(to_slots, pages, slots)):
                self._copy(to_slots, layers, pairs)
            event = self._streams.mark(to_slots)
        except RuntimeError as error:
            self._store.handle.end_copies(slots)
            self._counts["errors"] += 1
            raise CopyError(f"the GPU refuses a copy of {len(pairs)} pages, layers {layers}: {error}") from error
        ticket = CudaTicket(self, event, to_slots, pages, slots)
        self._live.append(ticket)
        way = "stored" if to_slots else "loaded"
        self._counts["tickets"] += 1
        self._counts[f"{way}_pages"] += len(pairs)
        self._counts[f"{way}_bytes"] += len(pairs) * len(layers) * sum(self._store.geometry.part_bytes)
        return ticket

    def _check(self, to_slots: bool, layers: range, pages: torch.Tensor, slots: torch.Tensor) -> None:
        if self._memory is None:
            raise StoreFault("the copy engine is closed")
        if layers.step != 1 or layers.start < 0 or layers.stop > len(self._parts):
            raise StoreFault(f"{layers} is no span of the {len(self._parts)} layers")
        if len(pages) != len(slots):
            raise StoreFault(f"{len(pages)} device pages and {len(slots)} slots")
        if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < self._num_pages:
            raise StoreFault(f"device pages {int(pages.min())} to {int(pages.max())} of {self._num_pages}")
        targets = (slots if to_slots else pages).tolist()
        if len(set(targets)) != len(targets):
            raise StoreFault(f"a target stands twice in one copy, among {targets}")

    def _before(self, to_slots: bool, pages: torch.Tensor, slots: torch.Tensor) -> list[DeviceEvent]:
        """What must have ended in the other stream; a stream keeps its own order."""
        page_set, slot_set = frozenset(pages.tolist()), frozenset(slots.tolist())
        return [
            ticket.event
            for ticket in self._live
            if ticket.to_slots != to_slots and (page_set & ticket.page_set or slot_set & ticket.slot_set)
        ]

    def _copy(self, to_slots: bool, layers: range, pairs: list[tuple[int, int]]) -> None:
        geometry = self._store.geometry
        for layer in layers:
            for part, offset in zip(self._parts[layer], geometry.part_offsets, strict=True):
                begin = layer * geometry.layer_bytes + offset
                places = self._slots[:, begin : begin + part.shape[1]]
                for page, slot in pairs:
                    target, source = (places[slot], part[page]) if to_slots else (part[page], places[slot])
                    target.copy_(source, non_blocking=True)

    def look(self, ticket: CudaTicket) -> None:
        """End the ticket if its copies have."""
        self._finish(ticket, wait=False)

    def wait(self, ticket: CudaTicket, timeout_s: float | None) -> None:
        """As Ticket.wait, but for its errors."""
        begun = time.perf_counter()
        self._finish(ticket, wait=timeout_s is None)
        while not ticket.ended:
            if timeout_s is not None and time.perf_counter() - begun > timeout_s:
                self._ticket_wait_s += time.perf_counter() - begun
                raise TimeoutError(f"the copy has not ended in {timeout_s} s")
            time.sleep(_POLL_S)  # a GPU has no wait with a limit
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
            ticket.error = f"the GPU reports an error after a copy of {len(ticket.slots)} pages: {error}"
            self._counts["errors"] += 1
        self._store.handle.end_copies(ticket.slots)
        self._live.remove(ticket)
        ticket.ended = True

    def counters(self) -> CopyCounters:
        """Bytes and pages are those given to the GPU; how long it was busy is not known here."""
        return CopyCounters(
            **self._counts,
            cancelled=0,
            busy_s=0.0,
            submit_wait_s=self._submit_wait_s,
            ticket_wait_s=self._ticket_wait_s,
        )

    def close(self) -> None:
        if self._memory is None:
            return
        for ticket in list(self._live):
            self._finish(ticket, wait=True)
        self._streams.unpin(self._memory)
        self._memory = None
