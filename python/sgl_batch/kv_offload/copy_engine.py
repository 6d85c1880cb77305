"""Owns the contract of copies between device pages and the host KV store. Which pages are copied is decided elsewhere.

One page's life in the store: `prepare_store`, `store_pages`, wait for the ticket, `complete_store`; later `load_pages`,
wait for that ticket. Until a ticket is done, the device pages and the blocks of its copy belong to the ticket: the
caller neither writes to a source, nor reads a target, nor gives either to another sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sgl_batch.kv_offload.host_kv_store import Indices
from sgl_batch.kv_offload.store_geometry import PagedPool


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCounters:
    """What an engine has done since it was made. Bytes and pages are those of tickets that ended well."""

    stored_bytes: int
    loaded_bytes: int
    stored_pages: int
    loaded_pages: int
    tickets: int
    errors: int
    cancelled: int
    busy_s: float
    """Sum over all workers."""
    submit_wait_s: float
    """Time that `store_pages` and `load_pages` waited for room in the queue."""
    ticket_wait_s: float
    """Time that callers waited for tickets."""


class Ticket(Protocol):
    """One submitted copy.

    The caller keeps the ticket until it is done, and waits for it before it uses the copy's targets or reuses its
    sources. A dropped ticket does not cancel its copy.
    """

    @property
    def done(self) -> bool:
        """Whether the copy has ended, well or not. `wait` then returns or raises at once."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Block the host until the whole copy is made.

        Args:
            timeout_s: the longest wait in seconds; None waits without a limit.

        Raises:
            CopyError: a part of the copy failed; its targets are undefined. Raised again by each later call.
            CopyCancelled: a part was cancelled; its targets are undefined. Raised again by each later call.
            TimeoutError: the copy has not ended within `timeout_s`. The copy goes on.
        """

    def device_waits(self) -> None:
        """Order all work that the device is given from now on after this copy.

        On a GPU the computing stream waits and the host does not; errors are raised by `wait` alone. On a CPU the host
        computes, so this blocks until the copy is made, and raises as `wait` does.
        """

    def cancel(self) -> bool:
        """Cancel the parts of the copy that have not begun.

        The ticket is done when the parts that have begun have ended.

        Returns:
            Whether any part was cancelled. Always False on a GPU: a stream keeps the work that it was given.
        """


class CopyEngine(Protocol):
    """Copies pages of consecutive layers between one pool and one store, while the caller goes on.

    Tickets that share a block or a device page run in the order of submission; others may overlap. Submission waits
    while too many tickets, or too many bytes, have not ended. Layers are counted from the pool's first.
    """

    def store_pages(self, layers: range, device_pages: Indices, blocks: Indices) -> Ticket:
        """Begin to copy layers of device_pages[i] to blocks[i], for every i.

        The caller leaves the device pages unchanged until the ticket is done. Then it calls `complete_store` for
        blocks that are WRITING, before they are loaded.

        Args:
            layers: consecutive layers of the pool, step 1.
            device_pages: sources, int64 [N].
            blocks: targets, int64 [N], all different, held by this rank: WRITING, or READY with one reference, which
                are then written again.

        Raises:
            StoreFault: an argument breaks these rules, or the engine is closed; nothing is copied.
            CopyError: the GPU refuses the copy.
        """

    def load_pages(self, layers: range, blocks: Indices, device_pages: Indices) -> Ticket:
        """Begin to copy layers of blocks[i] to device_pages[i], for every i.

        The caller keeps its references to the blocks, and neither reads nor frees the device pages, until the ticket is
        done.

        Args:
            layers: consecutive layers of the pool, step 1.
            blocks: sources, int64 [N], READY and held by this rank. One block may go to several pages.
            device_pages: targets, int64 [N], all different.

        Raises:
            StoreFault: an argument breaks these rules, or the engine is closed; nothing is copied.
            CopyError: the GPU refuses the copy.
        """

    def counters(self) -> CopyCounters:
        """Return what was done so far."""

    def close(self) -> None:
        """Cancel the copies that have not begun, wait for the others, and end. A second call does nothing."""


class CopyEngines(Protocol):
    """Makes the copy engines of one store."""

    def engine_for(self, pool: PagedPool) -> CopyEngine:
        """Return a new engine for the pages of `pool`, which has the store's geometry. The caller closes the engine."""

    def close(self) -> None:
        """Free what the engines share. The caller has closed all engines before."""
