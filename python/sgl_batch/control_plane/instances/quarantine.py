"""Owns the suspects of a pool: lines that an engine had when it died for no known reason.

They run again in groups, each alone on one instance, as in `jobs.batch_service.suspect_queue`; a group that kills its
engine is split (`bisect_suspects`). Groups are in memory: a server that is started again begins with the lines anew,
and finds a line that kills engines in at most as many deaths again. No other line fails for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from sgl_batch.control_plane.instances.pool_line import PoolLine
from sgl_batch.jobs.batch_service.bisect_suspects import split_suspects

DEATHS_ALONE = 2  # a line under which so many engines die while it runs alone is failed


@dataclass(slots=True, eq=False)
class SuspectGroup:
    """Lines that run together, with no others. `deaths_alone`: engines that died while it was one line."""

    lines: list[PoolLine] = field(default_factory=list)
    deaths_alone: int = 0

    def wanted(self) -> list[PoolLine]:
        """Return the lines that wait for an answer still."""
        return [line for line in self.lines if not line.answer.done()]


class Quarantine:
    """The groups that have to run, in order."""

    def __init__(self) -> None:
        self._groups: deque[SuspectGroup] = deque()

    def __len__(self) -> int:
        return len(self._groups)

    def next(self) -> SuspectGroup | None:
        """Take the next group, or None. The caller gives it back, or says how it ended."""
        while self._groups:
            group = self._groups.popleft()
            if group.wanted():
                return group
        return None

    def put_back(self, group: SuspectGroup) -> None:
        """Take a group whose instance has gone for a reason that blames no line."""
        self._groups.appendleft(group)

    def died(self, group: SuspectGroup | None, unanswered: Sequence[PoolLine], *, known: bool) -> list[PoolLine]:
        """Note an engine's death, and what it had not answered. Returns the lines that are to blame for it.

        Args:
            group: What ran alone, or None where the lines were not suspected before.
            unanswered: Lines that the engine had.
            known: Whether the reason is known, so that no line is to blame.
        """
        if group is not None and len(group.lines) == 1:
            group.deaths_alone += not known
            if group.deaths_alone >= DEATHS_ALONE:
                return group.wanted()
            # The tokens themselves may have killed the engine: the last try begins without them.
            group.lines[0].partial_output.cut(0)
            self._groups.appendleft(group)
            return []
        parts = [list(unanswered)] if known and group is not None else split_suspects(unanswered)
        self._groups.extendleft(SuspectGroup(lines=list(part)) for part in reversed(parts) if part)
        return []
