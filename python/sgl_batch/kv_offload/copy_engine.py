"""Owns the contract of copies between device pages and the host KV store. Which pages are copied is decided elsewhere.

A page's life: `prepare_store`, `store_pages`, wait for the ticket, `complete_store`; later `load_pages`, wait. Until a
ticket is done, the device pages and blocks of its copy belong to it: nobody writes to a source or reads a target, and
nobody gives either to another sequence.
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
    """Of all workers together."""
    submit_wait_s: float
    """That submitters waited for room in the queue."""
    ticket_wait_s: float
    """That others waited for tickets."""


class Ticket(Protocol):
    """A copy that was submitted."""

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not; `wait` tells which, and does not wait then."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when all is copied.

        Raises CopyError where a part could not be, CopyCancelled where some was left out, and TimeoutError where it has
        not ended in that time. The first two say so each time they are asked.
        """

    def device_waits(self) -> None:
        """What the device is given to compute from now on comes after this copy; on a CPU, after this has returned.

        A GPU's errors are told by `wait`, a CPU's here as well.
        """

    def cancel(self) -> bool:
        """Leave out what has not begun; whether there was any. The ticket is done when the rest has ended."""


class CopyEngine(Protocol):
    """Copies pages of a span of layers, many at a time, while the caller goes on.

    Tickets that touch the same block or device page run in the order of submission; others may overlap. Submission
    waits while too many tickets have not ended. Layers are counted from the pool's first. StoreFault, and nothing done,
    where blocks are not this rank's or not in the state for it, or where a target stands twice in one call.
    """

    def store_pages(self, layers: range, device_pages: Indices, blocks: Indices) -> Ticket:
        """Copy layers of device_pages[i] to blocks[i], which are WRITING, or READY and held once: written again."""

    def load_pages(self, layers: range, blocks: Indices, device_pages: Indices) -> Ticket:
        """Copy layers of blocks[i], which are READY, to device_pages[i]. A block may go to several pages."""

    def counters(self) -> CopyCounters:
        """What was done so far."""

    def close(self) -> None:
        """Cancel what has not begun, wait for what is under way, and end. A second time nothing happens."""


class CopyEngines(Protocol):
    """Makes the copy engines of one store."""

    def engine_for(self, pool: PagedPool) -> CopyEngine:
        """An engine for the pages of a pool, whose geometry the store has."""

    def close(self) -> None:
        """All its engines are closed."""
