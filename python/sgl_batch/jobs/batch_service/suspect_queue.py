"""Owns the groups of suspects that have to run again, in memory and on disk. `bisect_suspects` splits them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sgl_batch.jobs.batch_service.bisect_suspects import split_suspects
from sgl_batch.jobs.batch_service.storage_guard import StorageGuard
from sgl_batch.jobs.failpoints import failpoint
from sgl_batch.jobs.job_store.result_rows import LineKey, replace_group
from sgl_batch.jobs.job_store.store import JobStore


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectGroup:
    """Lines that run together, with no other lines."""

    number: int
    lines: tuple[LineKey, ...]


class SuspectQueue:
    """The groups, by number. A line leaves the disk when it is committed; a group leaves the memory when it has run."""

    def __init__(self, store: JobStore, guard: StorageGuard) -> None:
        self._store = store
        self._guard = guard
        self._groups: dict[int, SuspectGroup] = {}
        self._next_number = 1

    def first(self) -> SuspectGroup | None:
        """Return the group to run now, or None."""
        return self._groups[min(self._groups)] if self._groups else None

    def restore(self, lines: Iterable[tuple[int, LineKey]]) -> None:
        """Add the suspects of one job, with the numbers of their groups, after a restart."""
        for number, line in lines:
            before = self._groups[number].lines if number in self._groups else ()
            self._groups[number] = SuspectGroup(number=number, lines=(*before, line))
            self._next_number = max(self._next_number, number + 1)

    def remove(self, group: SuspectGroup) -> None:
        """Remove a group that has run: its lines are committed, or their jobs are over."""
        del self._groups[group.number]

    async def split(self, group: SuspectGroup | None, suspects: Sequence[LineKey]) -> None:
        """Put the lines that a dead engine was computing into smaller groups, on disk first.

        `group`: the group that ran, or None where lines ran that were not suspected before.
        """
        groups = [
            SuspectGroup(number=self._next_number + position, lines=lines)
            for position, lines in enumerate(split_suspects(suspects))
        ]
        self._next_number += len(groups)
        old = None if group is None else group.number
        rows = [(one.number, one.lines) for one in groups]
        await self._guard.persist(lambda: self._store.write(lambda db: replace_group(db, old, suspects, rows)))
        failpoint("suspects.groups_written")
        if group is not None:
            self.remove(group)
        self._groups.update((one.number, one) for one in groups)
