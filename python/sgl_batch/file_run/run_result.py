"""Owns the result of a run: counts, tokens, status and exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from sgl_batch.core.answers import EngineStats
from sgl_batch.file_run.plan_outcome import PlanOutcome
from sgl_batch.file_run.run_cost import RunCost
from sgl_batch.jobs.cost import EngineTime
from sgl_batch.planner.workload import Workload

MAX_FAILURE_CODES = 100


class RunStatus(Enum):
    """How a run ended."""

    COMPLETED = "completed"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(slots=True, kw_only=True)
class FailureKind:
    """The failed lines with one error code, and the first of them as an example."""

    first_line: int
    first_message: str
    count: int = 0


class Failures:
    """Failed lines by error code; the number of codes is bounded."""

    def __init__(self) -> None:
        self.by_code: dict[str, FailureKind] = {}

    def add(self, code: str, line: int, message: str) -> None:
        """Count one failed line."""
        if code not in self.by_code and len(self.by_code) >= MAX_FAILURE_CODES:
            code = "other"
        kind = self.by_code.setdefault(code, FailureKind(first_line=line, first_message=message))
        kind.count += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The end of a run. `message` says why it did not complete. `stats` is None where the engine sent none.

    `lengths`: of the answered lines; None without any. `plan`: what became of the plan's prediction, where known.
    `refinements`: what was decided about the plan during the run (file_run/plan_refiner). `cost`: None without a price.
    """

    status: RunStatus
    message: str | None
    total: int
    ok: int
    failed: int
    wall_s: float
    tokens_in: int
    tokens_out: int
    failures: Mapping[str, FailureKind] = field(default_factory=dict)
    stats: EngineStats | None = None
    lengths: Workload | None = None
    plan: PlanOutcome | None = None
    refinements: Sequence[Mapping[str, Any]] = ()
    cost: RunCost | None = None
    kept: int = 0  # lines of an earlier run; tokens and time are those of this run

    @property
    def missing(self) -> int:
        """Lines that have neither an output nor an error."""
        return self.total - self.ok - self.failed

    @property
    def engine_time(self) -> EngineTime:
        """The time that the run had its engine, with its own lines and tokens, without those that it kept."""
        return EngineTime(
            seconds=self.wall_s,
            lines=self.ok + self.failed - self.kept,
            input_tokens=self.tokens_in,
            output_tokens=self.tokens_out,
        )

    @property
    def exit_code(self) -> int:
        """0 all lines ok, 2 finished with failed lines, 3 crash, 130 stopped by a signal."""
        if self.status is RunStatus.INTERRUPTED:
            return 130
        if self.status is RunStatus.FAILED:
            return 3
        return 2 if self.failed else 0
