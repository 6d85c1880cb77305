"""The lots of suspects that are still to be run, in memory and on disk; suspect_lots decides how they are split."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sgl_batch.jobs.batch_service.storage_guard import StorageGuard
from sgl_batch.jobs.batch_service.suspect_lots import split_suspects
from sgl_batch.jobs.failpoints import failpoint
from sgl_batch.jobs.job_store.result_rows import LineKey, replace_lot
from sgl_batch.jobs.job_store.store import JobStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Lot:
    """Lines that are run together, with nothing beside them."""

    number: int
    lines: tuple[LineKey, ...]


class SuspectQueue:
    """Committing a line removes it from the disk; a lot leaves the memory when it has been run."""

    def __init__(self, store: JobStore, guard: StorageGuard) -> None:
        self._store = store
        self._guard = guard
        self._lots: dict[int, Lot] = {}
        self._next_number = 1

    def first(self) -> Lot | None:
        """The lot to run now."""
        return self._lots[min(self._lots)] if self._lots else None

    def restore(self, lines: Iterable[tuple[int, LineKey]]) -> None:
        """Take up suspects of one job, with the numbers of their lots, after a restart."""
        for number, line in lines:
            before = self._lots[number].lines if number in self._lots else ()
            self._lots[number] = Lot(number=number, lines=(*before, line))
            self._next_number = max(self._next_number, number + 1)

    def remove(self, lot: Lot) -> None:
        """The lot has been run, and its lines are committed or their jobs are over."""
        del self._lots[lot.number]

    async def split(self, lot: Lot | None, suspects: Sequence[LineKey]) -> None:
        """An engine died while it ran `lot`, or, with None, lines of every kind: put what it was at in smaller lots."""
        lots = [
            Lot(number=self._next_number + position, lines=lines)
            for position, lines in enumerate(split_suspects(suspects))
        ]
        self._next_number += len(lots)
        old = None if lot is None else lot.number
        rows = [(one.number, one.lines) for one in lots]
        await self._guard.persist(lambda: self._store.write(lambda db: replace_lot(db, old, suspects, rows)))
        failpoint("suspects.lots_written")
        if lot is not None:
            self.remove(lot)
        self._lots.update((one.number, one) for one in lots)
