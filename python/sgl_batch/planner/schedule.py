"""Predicts when a batch is done: prefill groups and decode intervals as the scheduler would make them, without events.

It follows core/page_boundary: prefill goes on until enough sequences are ready, decode steps come in intervals between
boundaries, and READY sequences join at a boundary. Time passes in runs of equal steps, not step by step.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from sgl_batch.core.page_ledger import pages_for
from sgl_batch.core.plan import Plan
from sgl_batch.core.residency import FREE_PAGES
from sgl_batch.planner.candidate import DEVICE, EXCLUSIVE, STREAMED
from sgl_batch.planner.pass_cost import PassCost, PassTime
from sgl_batch.planner.workload import Request, Workload, followed

# Sequences that are followed one by one; of a larger batch the middle is one long steady state.
_MOST_FOLLOWED = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Pages of KV that each tier holds; `store` is 0 without a store."""

    device: int
    store: int = 0


@dataclass(slots=True, kw_only=True)
class Prediction:
    """The predicted run of a batch. `parts`: seconds by part; `bottlenecks`: seconds by what passes mostly waited for.

    `hideable_s`: waits for copies that two groups by turns would hide. `bounds`: seconds by what bounds them: memory,
    compute, copies, exchange, fixed overhead.

    `steps`, `rows`: decode steps, and the rows of all of them together; `groups`: prefill groups.
    """

    seconds: float = 0.0
    hideable_s: float = 0.0
    prefill_s: float = 0.0
    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    bottlenecks: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    bounds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: float = 0.0
    rows: float = 0.0
    groups: float = 0.0

    @property
    def mean_rows(self) -> float:
        """Return the sequences of a decode step on average."""
        return self.rows / self.steps if self.steps else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the prediction as JSON."""
        return {
            "seconds": round(self.seconds, 3),
            "prefill_s": round(self.prefill_s, 3),
            "decode_s": round(self.seconds - self.prefill_s, 3),
            "parts_s": {name: round(seconds, 3) for name, seconds in self.parts.items() if seconds > 0},
            "decode_steps": round(self.steps),
            "mean_rows": round(self.mean_rows, 1),
            "prefill_groups": round(self.groups),
        }

    def plus(self, other: Prediction, times: float) -> Prediction:
        """Return this one and `times` the other one."""
        made = Prediction()
        for name in ("seconds", "hideable_s", "prefill_s", "steps", "rows", "groups"):
            setattr(made, name, getattr(self, name) + times * getattr(other, name))
        for name in ("parts", "bottlenecks", "bounds"):
            mine, its = getattr(self, name), getattr(other, name)
            setattr(made, name, defaultdict(float, {part: mine[part] + times * its[part] for part in {**mine, **its}}))
        return made


def predict(workload: Workload, plan: Plan, cost: PassCost, room: Room, kv: str) -> Prediction | None:
    """Return the run of a batch, or None where a sequence can never fit."""
    whole = _run(followed(workload, _MOST_FOLLOWED), plan, cost, room, kv)
    left = workload.count - _MOST_FOLLOWED
    if whole is None or left <= 0:
        return whole
    half = _run(followed(workload, _MOST_FOLLOWED // 2), plan, cost, room, kv)
    assert half is not None, "what fits all fits some"
    # What the second half of those followed adds is what each further half adds: start and end happen once.
    return whole.plus(whole.plus(half, -1.0), left / (_MOST_FOLLOWED / 2))


class _Run:
    """The state of the run: queued requests, READY ones, and running ones by the step at which they end."""

    def __init__(self, workload: Workload, plan: Plan, cost: PassCost, room: Room, kv: str) -> None:
        self.queued, self.ready = deque(workload.requests), deque[Request]()
        self.plan, self.cost, self.room, self.kv = plan, cost, room, kv
        self.running: list[tuple[int, int, Request]] = []
        self.now = self.number = self.held = self.most_held = self.context = 0
        self.found = Prediction()

    def pages(self, request: Request) -> int:
        """Return the pages that a sequence holds on the device at its end."""
        return pages_for(request.prompt + request.output, self.plan.page_size)

    @property
    def capacity(self) -> int:
        """Return the pages that admitted sequences may take, wherever their KV lies."""
        return {DEVICE: self.room.device, EXCLUSIVE: self.room.device + self.room.store}.get(self.kv, self.room.store)

    def prefill(self) -> bool:
        """Compute groups until enough sequences are ready, or none is left that fits. Return whether there was one."""
        any_made = False
        while self.queued and len(self.running) + len(self.ready) < self.plan.ready_target:
            group: list[Request] = []
            tokens = 0
            while self.queued:
                request = self.queued[0]
                full = group and tokens + request.prompt > self.plan.prefill.b_moe
                if full or self.held + self.pages(request) > self.capacity:
                    break
                group.append(self.queued.popleft())
                tokens, self.held = tokens + request.prompt, self.held + self.pages(request)
                self.most_held = max(self.most_held, self.held)
                if len(self.running) + len(self.ready) + len(group) >= 2 * self.plan.decode.b_moe:
                    break
            if not group:
                break
            any_made = True
            self._add_prefill([request.prompt for request in group])
            self.ready += group
        return any_made

    def _add_prefill(self, lengths: list[int]) -> None:
        time = self.cost.prefill(lengths)
        self.found.groups += 1
        self.found.prefill_s += time.seconds
        self.add(time, 1)

    def add(self, time: PassTime, times: int) -> None:
        """Add a time that comes `times` times."""
        seconds = time.seconds
        self.found.seconds += times * seconds
        self.found.hideable_s += times * time.hideable_s
        self.found.bottlenecks[time.bottleneck] += times * seconds
        for mine, its in ((self.found.parts, time.parts), (self.found.bounds, time.bounds)):
            for name, value in its.items():
                mine[name] += times * value

    def refill(self) -> None:
        """Let READY sequences join the decode group, as far as it, and with a store the device, has room."""
        most = self.plan.decode.b_moe
        if self.kv not in (DEVICE, STREAMED):
            each = max((pages_for(r.prompt + r.output // 2, self.plan.page_size) for r in self.ready), default=1)
            most = min(most, max(self.room.device // (each + FREE_PAGES), 1))
        while self.ready and len(self.running) < most:
            request = self.ready.popleft()
            if self.kv not in (DEVICE, STREAMED):
                self.add(self.cost.restore(request.prompt), 1)
            if request.output == 1:  # prefill gave its only token
                self.held -= self.pages(request)
                continue
            self.number += 1
            heapq.heappush(self.running, (self.now + request.output - 1, self.number, request))
            self.context += request.prompt

    def decode(self) -> None:
        """Run the steps up to the next boundary, in runs between which no sequence ends.

        It comes early where waiting sequences could double the group (core/page_boundary). Pages of a device before a
        store can keep groups small for long; early boundaries change little there, and are not followed.
        """
        left = self.plan.boundary_tokens
        while left and self.running:
            steps = min(left, self.running[0][0] - self.now)
            rows = len(self.running)
            if steps:
                time = self.cost.decode(rows, self.context / rows + steps / 2)
                self.add(time, steps)
                self.found.steps += steps
                self.found.rows += steps * rows
                self.now, self.context, left = self.now + steps, self.context + steps * rows, left - steps
            while self.running and self.running[0][0] <= self.now:
                _, _, request = heapq.heappop(self.running)
                self.context -= request.prompt + request.output - 1
                self.held -= self.pages(request)
            waiting, is_few = len(self.ready) + len(self.queued), 2 * len(self.running) <= self.plan.decode.b_moe
            if is_few and waiting >= len(self.running) and self.kv in (DEVICE, STREAMED):
                return


def _run(workload: Workload, plan: Plan, cost: PassCost, room: Room, kv: str) -> Prediction | None:
    run = _Run(workload, plan, cost, room, kv)
    if any(run.pages(request) > min(run.capacity, room.device) for request in workload.requests):
        return None
    while run.queued or run.ready or run.running:
        resident = len(run.running) + len(run.ready)
        prefilled = resident < max(plan.refill_watermark * plan.decode.b_moe, 1) and run.prefill()
        run.refill()
        if run.running:
            run.decode()
        elif not prefilled and not run.ready:
            assert not run.queued, "an empty device takes the next sequence"
    on_device = 0 if kv in (DEVICE, EXCLUSIVE) else min(run.most_held, room.device)
    run.add(cost.new_memory((run.most_held + on_device) * plan.page_size), 1)
    return run.found
