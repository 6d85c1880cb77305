"""Refines the plan of a long run from its own measured steps: decides when, and carries the change to the engine.

`planner.refinement` decides what changes. The engine puts it in force at a boundary.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sgl_batch.core.answers import EngineStats
from sgl_batch.core.sequence import Status
from sgl_batch.errors import ConfigError, EngineError
from sgl_batch.planner.measured_costs import PARTS, Measured
from sgl_batch.planner.pass_cost import STEP
from sgl_batch.planner.refinement import PlanBasis, refine
from sgl_batch.planner.workload import Workload

logger = logging.getLogger(__name__)

DEFAULT_AFTER_MINUTES = 3.0
DEFAULT_LEAST_LEFT = 512
# No fault of planning ends a run.
_FAULTS = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)

Change = Callable[[Mapping[str, Any], str], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """How far a run is: lines that are left, lines that were answered in this run, and how long these were."""

    left: int
    answered: int
    lengths: Workload | None


class PlanRefiner:
    """Looks at the engine's counters during a run, and refines the plan each time that enough has been measured.

    A first decision comes when decode has run for `after_s` seconds, the next after twice as long, and so on: each is
    made from the passes since the last one. `records` has the decisions, for the manifest and the summary.

    Args:
        basis: The plan and what it was chosen from; None where nothing predicts another.
        why_none: Why there is no basis, for the user.
        change: Has the engine put new settings in force at the next boundary; the second argument is the reason. It
            raises ConfigError where the engine refuses them.
        note: Shows the user a line.
        after_s: Seconds of work in which passes are measured first; 0: the plan is never refined.
        least_left: Lines that must be left, so that a change pays for itself.
    """

    def __init__(
        self,
        basis: PlanBasis | None,
        why_none: str,
        change: Change,
        note: Callable[[str], None],
        *,
        after_s: float,
        least_left: int,
    ) -> None:
        self._basis, self._why_none, self._change, self._note = basis, why_none, change, note
        self._after_s, self._least_left = after_s, least_left
        self._first: EngineStats | None = None
        self._deciding: asyncio.Task[None] | None = None
        self.records: list[dict[str, Any]] = []

    def observe(self, stats: EngineStats, progress: RunProgress) -> None:
        """Look at a reading of the counters. Begins a decision, in the background, where one is due."""
        if not self._after_s or self._deciding is not None or not stats.counters.get("decode_groups"):
            return
        if self._first is None or stats.paused:
            self._first = None if stats.paused else stats
            return
        measured = measured_passes(stats.since(self._first), progress.lengths)
        if measured.seconds < self._after_s or progress.left < self._least_left:
            return
        self._first, self._after_s = None, 2 * self._after_s
        if self._basis is None:
            self._after_s = 0.0
            self._note(f"plan: not refined, because nothing predicts another ({self._why_none})")
            return
        left = workload_left(progress, stats, self._basis.workload)
        self._deciding = asyncio.ensure_future(self._decide(self._basis, measured, left))

    async def close(self) -> None:
        """End a decision that is under way, with the run."""
        if self._deciding is not None:
            self._deciding.cancel()
            await asyncio.wait({self._deciding})

    async def _decide(self, basis: PlanBasis, measured: Measured, left: Workload) -> None:
        record: dict[str, Any] = {"measured_s": round(measured.seconds, 1)}
        try:
            # In a thread of usual priority: one of low priority would keep the interpreter's lock while it waits for a
            # core, and the event loop with it.
            decision = await asyncio.to_thread(refine, basis, measured, left, time.perf_counter)
            if decision is not None:
                record |= {**decision.as_dict(), "line": decision.line}
                if decision.changes:
                    await self._change(decision.changes, decision.why)
                self._basis = decision.basis
        except EngineError:
            return  # the run finds it as well, and ends
        except ConfigError as error:
            record |= {"changes": {}, "line": f"kept: the engine refuses the better one: {error}"}
        except _FAULTS as error:
            logger.debug("refining the plan failed", exc_info=True)
            record |= {"changes": {}, "line": f"kept: refining it failed: {type(error).__name__}: {error}"}
        finally:
            self._deciding = None
        if "line" in record:
            self.records.append(record)
            self._note(f"plan {record['line']}")


def measured_passes(stats: EngineStats, lengths: Workload | None) -> Measured:
    """Return what an engine counted in some time as the planner compares it. `lengths`: of answered requests."""
    counters, parts = stats.counters, {name: stats.part_s.get(name, 0.0) for name in PARTS if name != STEP}
    busy_s = sum(stats.part_s.values()) - stats.part_s.get("idle", 0.0)
    tokens = float(counters.get("prefill_rows", 0))
    prompts = [one.prompt for one in lengths.requests] if lengths is not None else []
    return Measured(
        steps=counters.get("decode_groups", 0),
        rows=counters.get("decode_rows", 0),
        looked_at=counters.get("decode_kv_tokens", 0),
        groups=counters.get("prefill_groups", 0),
        tokens=tokens,
        prompt=sum(prompts) / len(prompts) if prompts else tokens,
        part_s={**parts, STEP: max(busy_s - sum(parts.values()), 0.0)},
    )


def workload_left(progress: RunProgress, stats: EngineStats, planned: Workload) -> Workload:
    """Return the requests that are left, as long as those that were answered.

    The first answers are the short ones. So the lengths are those that were planned for, until more sequences were
    answered than are begun and not ended.
    """
    begun = sum(count for status, count in stats.sequences.items() if status != Status.QUEUED.value)
    answered = progress.lengths
    if answered is None or answered.count < max(begun, 1):
        return replace(planned, count=progress.left)
    each = answered.count / max(progress.answered, 1)
    return replace(answered, count=max(round(progress.left * each), 1))
