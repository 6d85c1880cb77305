"""Puts changes of the plan in force, between two steps or at the next boundary, and records each in the trace.

`core.plan_in_force` decides which changes are accepted. With several ranks, all of them call in the same order.
"""

from __future__ import annotations

from sgl_batch.config import BatchConfig
from sgl_batch.core.decision_record import plan_record
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.managers.trace import TraceWriter
from sgl_batch.metrics.counters import Counters


class PlanChanges:
    """The changes of one rank's plan. One that waits for a boundary is part of all that are prepared after it."""

    def __init__(self, in_force: PlanInForce, counters: Counters, trace: TraceWriter) -> None:
        self._in_force, self._counters, self._trace = in_force, counters, trace
        self._waiting: tuple[BatchConfig, str] | None = None

    @property
    def waits(self) -> bool:
        """Whether a change waits for a boundary."""
        return self._waiting is not None

    def make(self, wanted: BatchConfig, why: str) -> None:
        """Put a prepared configuration in force: now, and with it one that waits; or, with a `why`, at a boundary."""
        if why:
            self._waiting = wanted, why
        else:
            self._apply(wanted, "asked for" if self._waiting is None else f"asked for, and {self._waiting[1]}")

    def at_boundary(self) -> None:
        """Put the change that waits in force, if there is one. Must run before anything is decided at a boundary."""
        if self._waiting is not None:
            self._apply(*self._waiting)

    def _apply(self, wanted: BatchConfig, why: str) -> None:
        in_force, before = self._in_force, self._in_force.plan
        in_force.apply(wanted)
        self._counters.add("plan_refinements", int(self._waiting is not None))
        self._waiting = None
        if self._trace.is_open:
            record = plan_record(before, in_force.plan, wanted.flat(), in_force.device_facts(), why)
            self._trace.write_decision(record)
