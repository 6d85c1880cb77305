"""Owns the report of a rank's migrations: how each move ended, and the failures. Its reader decides on recovery."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass

from sgl_batch.distributed.rank_errors import RankError


class Result(enum.Enum):
    """How the move of one sequence ended on this rank (protocol.py has the table)."""

    RELEASED = "moved away"
    KEPT = "stayed here"
    RECLAIMED = "taken back from a dead rank"
    ADOPTED = "moved here"
    NOT_ADOPTED = "not taken"
    IN_DOUBT = "in doubt: held whole, not to be run"


OWNED_HERE = frozenset({Result.KEPT, Result.RECLAIMED, Result.ADOPTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of one move as this rank knows it. `peer` is the other rank, `reason` why the sequence did not move."""

    sequence_id: str
    peer: int
    result: Result
    reason: str = ""

    @property
    def owned_here(self) -> bool:
        """Whether this rank may run the sequence."""
        return self.result in OWNED_HERE


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcomes of this rank's moves, and the failures of ranks. A refusal for lack of room is no failure."""

    outcomes: tuple[Outcome, ...]
    failures: tuple[RankError, ...] = ()


class MigrationFailed(RankError):  # noqa: N818 (the name says which error it is)
    """A rank failed during migrations. `report` still has the outcome of every sequence."""

    def __init__(self, report: Report) -> None:
        counts = Counter(outcome.result for outcome in report.outcomes)
        ends = ", ".join(f"{count} {result.value}" for result, count in counts.items()) or "none"
        reasons = "; ".join(dict.fromkeys(map(str, report.failures)))
        super().__init__(None, f"migration failed: {reasons}. Sequences on this rank: {ends}")
        self.report = report
