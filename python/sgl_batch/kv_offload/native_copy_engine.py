"""Owns copies between device pages in RAM and the store: the contract of copy_engine.py over native threads."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from sgl_batch.kernel_loader import kv_store_kernels
from sgl_batch.kv_offload.copy_engine import CopyCounters
from sgl_batch.kv_offload.host_kv_store import HostKVStore, Indices, as_indices
from sgl_batch.kv_offload.store_errors import CopyCancelled, CopyError, StoreFault, faults
from sgl_batch.kv_offload.store_geometry import PagedPool

MAX_TICKETS = 1024
MAX_BYTES = 1 << 30
"""Of tickets that have not ended; submission waits beyond it."""


class NativeTicket:
    """A Ticket of NativeCopyEngine."""

    __slots__ = ("_handle", "_states")

    def __init__(self, handle: Any, states: Any) -> None:
        self._handle, self._states = handle, states

    @property
    def done(self) -> bool:
        return bool(self._handle.state() != self._states.UNDER_WAY)

    def wait(self, timeout_s: float | None = None) -> None:
        if not self._handle.wait(-1.0 if timeout_s is None else max(0.0, timeout_s)):
            raise TimeoutError(f"the copy has not ended in {timeout_s} s")
        state = self._handle.state()
        if state == self._states.FAILED:
            number, message = self._handle.error()
            raise CopyError(message, errno=number or None)
        if state == self._states.CANCELLED:
            raise CopyCancelled("the copy was cancelled before all of it was made")

    def device_waits(self) -> None:
        """Wait, because the host computes. Raises as `wait` does, so that no undefined data is computed with."""
        self.wait()

    def cancel(self) -> bool:
        return bool(self._handle.cancel())


def _close(handle: Any, parts: list[torch.Tensor]) -> None:
    """End the threads before the pages' memory is freed."""
    handle.close()
    parts.clear()


class NativeCopyEngines:
    """The copy engines of a store under a CPU, each with `num_workers` threads."""

    def __init__(self, store: HostKVStore, *, num_workers: int) -> None:
        self._store, self._num_workers = store, num_workers

    def engine_for(self, pool: PagedPool) -> NativeCopyEngine:
        """Return an engine for the pages of a pool."""
        return NativeCopyEngine(self._store, pool, num_workers=self._num_workers)

    def close(self) -> None:
        """Do nothing: the engines share nothing."""


class NativeCopyEngine:
    """A CopyEngine with `num_workers` threads, which never hold the GIL."""

    def __init__(
        self,
        store: HostKVStore,
        pool: PagedPool,
        *,
        num_workers: int = 1,
        max_tickets: int = MAX_TICKETS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Start an engine for `pool`, which has the store's geometry. A ticket of more than `max_bytes` runs alone."""
        kernels = kv_store_kernels()
        parts = [part for layer in range(pool.layer_num) for part in pool.page_parts(layer)]
        with faults():
            self._handle = kernels.start_copy_engine(
                store.handle, parts, num_workers=num_workers, most_operations=max_tickets, most_bytes=max_bytes
            )
        self._states = kernels
        # The threads also end when this engine is garbage-collected, or the process exits.
        self._closing = weakref.finalize(self, _close, self._handle, parts)

    def store_pages(self, layers: range, device_pages: Indices, blocks: Indices) -> NativeTicket:
        return self._submit(True, layers, device_pages, blocks)

    def load_pages(self, layers: range, blocks: Indices, device_pages: Indices) -> NativeTicket:
        return self._submit(False, layers, device_pages, blocks)

    def _submit(self, to_store: bool, layers: range, device_pages: Indices, blocks: Indices) -> NativeTicket:
        if layers.step != 1:
            raise StoreFault(f"{layers} is no span of layers: layers must be consecutive")
        pages, numbers = as_indices(device_pages), as_indices(blocks)
        with faults():
            ticket = self._handle.submit(to_store, layers.start, layers.stop, pages, numbers)
        return NativeTicket(ticket, self._states)

    def counters(self) -> CopyCounters:
        *counts, busy_ns, submit_ns, wait_ns = self._handle.totals()
        stored_bytes, loaded_bytes, stored_pages, loaded_pages, tickets, errors, cancelled = counts
        return CopyCounters(
            stored_bytes=stored_bytes,
            loaded_bytes=loaded_bytes,
            stored_pages=stored_pages,
            loaded_pages=loaded_pages,
            tickets=tickets,
            errors=errors,
            cancelled=cancelled,
            busy_s=busy_ns * 1e-9,
            submit_wait_s=submit_ns * 1e-9,
            ticket_wait_s=wait_ns * 1e-9,
        )

    def close(self) -> None:
        self._closing()
