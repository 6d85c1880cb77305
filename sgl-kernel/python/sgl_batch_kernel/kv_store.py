"""The store of KV pages and its copy engine as the native library has them, typed. They decide nothing.

All calls give up Python's lock while they run. What the caller did wrong is a ValueError and has changed nothing; what
the system refuses is a RuntimeError.
"""

from __future__ import annotations

from typing import Protocol

import torch

FREE, WRITING, READY = range(3)
"""States of a slot."""

UNDER_WAY, DONE, FAILED, CANCELLED = range(4)
"""States of a ticket."""


class Store(Protocol):
    """A table of slots that ranks share, and the memory or file behind it. Slots are int64 [N] on the CPU.

    A call with several slots does all of it or nothing.
    """

    def enter(self, pid: int, start: int) -> None:
        """This process is the rank from now on; `start` tells it from a later one with the same number."""

    def occupants(self) -> list[list[int]]:
        """[pid, start] of every rank, 0 where there is none."""

    def take(self, count: int) -> torch.Tensor:
        """Slots that were free, now WRITING with one reference; none at all where there are too few."""

    def complete(self, slots: torch.Tensor) -> None: ...

    def share(self, slots: torch.Tensor) -> None: ...

    def free(self, slots: torch.Tensor) -> None: ...

    def reclaim(self, rank: int) -> int:
        """Drop what a rank holds, this one or one that has ended; returns how many slots became free."""

    def begin_copies(self, slots: torch.Tensor, to_slots: bool) -> None:
        """Check that this rank may copy to or from these slots, and keep it from letting go of them until the end."""

    def end_copies(self, slots: torch.Tensor) -> None:
        """Those of a `begin_copies` have ended. CopyEngine below does both by itself."""

    def counts(self) -> tuple[int, int, int, int]:
        """Slots that are FREE, WRITING and READY; how often a rank died in the middle of a change of the table."""

    def describe(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """State and number of references of each."""

    def audit(self) -> None:
        """Count everything again; ValueError where the table does not agree with itself."""

    def memory(self) -> torch.Tensor:
        """All bytes of a store in memory, uint8, without a copy."""


class CopyTicket(Protocol):
    """A submitted copy."""

    def state(self) -> int: ...

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended; a negative timeout never ends."""

    def cancel(self) -> bool:
        """Leave out what has not begun; whether there was any."""

    def error(self) -> tuple[int, str]:
        """Of one that FAILED: errno, or 0, and what happened."""


class CopyEngine(Protocol):
    """Threads that copy between device pages and slots."""

    def submit(
        self, to_slots: bool, first_layer: int, last_layer: int, pages: torch.Tensor, slots: torch.Tensor
    ) -> CopyTicket:
        """Copy layers [first, last) of pages[i] to or from slots[i]; waits while the queue is full."""

    def close(self) -> None:
        """Leave out what has not begun and end the threads."""

    def totals(self) -> list[int]:
        """Bytes stored and loaded, pages stored and loaded, operations, errors, cancelled; then nanoseconds: workers
        busy, submitters waiting for room, others waiting for an end.
        """


def open_store(
    table_fd: int,
    *,
    create: bool,
    geometry: list[int],
    num_ranks: int,
    rank: int,
    data_fd: int,
    file_name: str,
) -> Store:
    """Make a table in the empty file `table_fd`, or open the one in it; neither descriptor is needed any longer.

    `geometry`: slots, layers, bytes of a layer and of a slot, where a layer's checksum lies (-1: nowhere), then bytes
    and offset of each part. `data_fd`: a file where `file_name` is not empty, otherwise shared memory, or -1 for memory
    of this process alone.
    """
    store: Store = torch.classes.sgl_batch_kernel.Store(table_fd, create, geometry, num_ranks, rank, data_fd, file_name)
    return store


def start_copy_engine(
    store: Store, parts: list[torch.Tensor], *, num_workers: int, most_operations: int, most_bytes: int
) -> CopyEngine:
    """Start an engine for device pages, given layer by layer, each part [num_pages, ...].

    The caller keeps `parts` alive until the engine is closed.
    """
    engine: CopyEngine = torch.classes.sgl_batch_kernel.CopyEngine(
        store, parts, num_workers, most_operations, most_bytes
    )
    return engine
