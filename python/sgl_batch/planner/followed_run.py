"""Follows a batch from pass to pass as the scheduler would run it, and counts equal passes. It adds up no seconds.

It follows core/page_boundary: prefill goes on until enough sequences are ready, decode steps come in intervals between
boundaries, and READY sequences join at a boundary. Time passes in runs of equal steps, not step by step. Where
reservations grow (core/growth), a sequence reserves its expected pages, and all that it needs when it outgrows them: if
pages lack then, it is stalled until they come free, and no prompt is admitted meanwhile. One may stand for several
equal ones.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from sgl_batch.core.page_ledger import pages_for
from sgl_batch.core.plan import Plan
from sgl_batch.core.residency import FREE_PAGES
from sgl_batch.planner.candidate import DEVICE, EXCLUSIVE, STREAMED
from sgl_batch.planner.expert_room import ExpertRoom
from sgl_batch.planner.pass_cost import PassCost, PassTime
from sgl_batch.planner.workload import Workload

RESERVE, FORECAST, TWO_PAGE = "reserve", "forecast", "two-page"


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Pages of KV that each tier holds; `store` is 0 without a store. `experts`: the memory of streamed experts."""

    device: int
    store: int = 0
    experts: ExpertRoom | None = None


class _Waiting(NamedTuple):
    """A sequence that is to run: its tokens of KV, the steps that it still takes, its pages, its whole output."""

    context: int
    steps: int
    held: int
    whole: int
    output: int


class _Running(NamedTuple):
    """A sequence that runs: the step at which it ends, its tokens then, and as in `_Waiting`."""

    end: int
    number: int
    context: int
    held: int
    whole: int
    output: int


def running_pages(workload: Workload, page_size: int) -> float:
    """Return the pages that a running sequence has on average.

    Half of its output is there on average, and one with a long output runs in more of the steps.
    """
    pages = sum(one.output * pages_for(one.prompt + one.output // 2, page_size) for one in workload.requests)
    return pages / sum(one.output for one in workload.requests)


class FollowedRun:
    """The state of a run.

    Attributes:
        prefills, steps_of: Prefill groups and decode steps, by identity: the time of one, and how many there were.
        intake_s: Seconds of the intake of all prefill groups.
        restored: Tokens of KV that came back to the device.
        steps, rows, groups: Decode steps, the rows of all of them together, and prefill groups.
        most_held: The most pages that were reserved at a time.
    """

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        cost: PassCost,
        room: Room,
        kv: str,
        *,
        admission: str = RESERVE,
        weight: int = 1,
    ) -> None:
        """Begin. `weight`: for how many equal sequences each one stands."""
        self.prefills: dict[int, tuple[PassTime, float]] = {}
        self.steps_of: dict[int, tuple[PassTime, int]] = {}
        self.intake_s = 0.0
        self.groups = 0.0
        self.steps = self.rows = self.most_held = self.restored = 0
        self._plan, self._cost, self._room = plan, cost, room
        self._weight, self._b_moe = weight, max(plan.decode.b_moe // weight, 1)
        self._ready_target = max(plan.ready_target // weight, 1)
        self._queued = deque(workload.requests)
        self._ready, self._stalled = deque[_Waiting](), deque[_Waiting]()
        self._running: list[_Running] = []
        self._outgrowing: list[tuple[int, int]] = []  # by step, the numbers of those that reserve no more than expected
        self._now = self._number = self._held = self._gap = self._context = 0
        self._admission, self._finished, self._mean = admission, 0, 0.0
        self._kept = 0.0  # the share of streamed experts that is in memory; a batch reads all of them at first
        stores = {DEVICE: room.device, EXCLUSIVE: room.device + room.store}
        self._all_pages = stores.get(kv, room.store)
        self._capacity = self._all_pages // weight
        self._lies_elsewhere = kv not in (DEVICE, STREAMED)
        each = running_pages(workload, plan.page_size) + FREE_PAGES
        self._most_on_device = max(int(room.device // (each * weight)), 1)

    @property
    def largest(self) -> int:
        """Return the pages of the largest sequence that fits."""
        return min(self._all_pages, self._room.device)

    def whole_pages(self, prompt: int, output: int) -> int:
        """Return the pages that a sequence has at its end."""
        return -(-(prompt + output) // self._plan.page_size)

    def kept_share(self, *, decode: bool) -> float:
        """Return the share of streamed experts that passes of a phase leave in memory now."""
        experts = self._room.experts
        return 0.0 if experts is None else experts.kept_share(decode=decode, pages=self.most_held)

    def _note_held(self) -> None:
        self.most_held = max(self.most_held, self._weight * self._held)

    def follow(self) -> None:
        """Run all requests to their ends."""
        plan = self._plan
        while self._queued or self._ready or self._running or self._stalled:
            self._extend()
            resident = len(self._running) + len(self._ready)
            prefilled = resident < max(plan.refill_watermark * self._b_moe, 1) and self._prefill()
            self._refill()
            if self._running:
                self._decode()
            elif not prefilled and not self._ready:
                assert not self._queued, "an empty device takes the next sequence"
                assert not self._stalled, "an empty device takes the next stalled sequence"

    def _extend(self) -> None:
        """Let those that outgrow their pages before the next boundary reserve the rest; who finds none is stalled."""
        soon = self._now + self._plan.boundary_tokens
        by_number: dict[int, _Running] = {}
        changed = False
        while self._outgrowing and self._outgrowing[0][0] <= soon:
            _, number = heappop(self._outgrowing)
            by_number = by_number or {one.number: one for one in self._running}
            one = by_number.get(number)
            if one is None:
                continue  # it has ended
            changed = True
            if self._held + one.whole - one.held <= self._capacity or len(by_number) == 1:
                self._held += one.whole - one.held
                by_number[number] = one._replace(held=one.whole)
            else:
                del by_number[number]
                self._stall(one)
        if changed:
            self._running = list(by_number.values())
            heapify(self._running)
            self._note_held()
        while self._stalled and (self._held == 0 or self._held + self._stalled[0].whole <= self._capacity):
            returning = self._stalled.popleft()
            self._held += returning.whole
            self.restored += self._weight * returning.context
            self._ready.appendleft(returning._replace(held=returning.whole))

    def _stall(self, one: _Running) -> None:
        steps = one.end - self._now
        self._held -= one.held
        self._context -= one.context - steps
        self._stalled.append(
            _Waiting(context=one.context - steps, steps=steps, held=0, whole=one.whole, output=one.output)
        )

    def _first_pages(self, prompt: int, whole: int) -> int:
        """Return the pages that a sequence reserves when it is admitted (core/admission.first_pages)."""
        if self._admission == RESERVE or (self._admission == FORECAST and not self._finished):
            return whole
        page_size = self._plan.page_size
        expected = math.ceil(self._mean) if self._admission == FORECAST else 0
        least = max(-(-prompt // page_size) + FREE_PAGES, -(-(prompt + self._plan.boundary_tokens) // page_size))
        return min(whole, max(-(-(prompt + expected) // page_size), least))

    def _prefill(self) -> bool:
        """Compute groups until enough sequences are ready, or none is left that fits. Return whether there was one."""
        any_made = False
        plan, queued = self._plan, self._queued
        weight, b_moe = self._weight, plan.prefill.b_moe
        while queued and not self._stalled and len(self._running) + len(self._ready) < self._ready_target:
            lengths: list[int] = []
            tokens, most = 0, 2 * self._b_moe - len(self._running) - len(self._ready)
            while queued:
                prompt, output = queued[0].prompt, queued[0].output
                whole = self.whole_pages(prompt, output)
                first = self._first_pages(prompt, whole)
                gap = max(self._gap if self._held else 0, whole - first)
                # With none alive the first one fits, if only one of those for which it stands at a time.
                lacking = self._held > 0 and self._held + first + gap > self._capacity
                if (lengths and tokens + weight * prompt > b_moe) or lacking:
                    break
                queued.popleft()
                lengths.append(prompt)
                tokens, self._held, self._gap = tokens + weight * prompt, self._held + first, gap
                self._ready.append(_Waiting(prompt, output - 1, first, whole, output))  # prefill gave a token
                if len(lengths) >= most:
                    break
            self._note_held()
            if not lengths:
                break
            any_made = True
            self._add_prefill(lengths)
        return any_made

    def _add_prefill(self, lengths: list[int]) -> None:
        """Add the groups of these prompts: one, or more where equal ones of one prompt make a group too large."""
        each = self._weight
        if len(lengths) == 1:
            each = min(each, max(self._plan.prefill.b_moe // lengths[0], 1))
        groups = self._weight / each
        kept_before, self._kept = self._kept, self.kept_share(decode=False)
        tokens, pairs = sum(lengths), sum(length * (length + 1) // 2 for length in lengths)
        kept = min(kept_before, self._kept)
        time = self._cost.prefill_group(each * tokens, each * pairs, read=each * len(lengths), kept=kept)
        self.prefills[id(time)] = time, self.prefills.get(id(time), (time, 0.0))[1] + groups
        self.intake_s += groups * self._cost.intake_s(each * len(lengths))
        self.groups += groups

    def _add(self, time: PassTime, times: int) -> None:
        self.steps_of[id(time)] = time, self.steps_of.get(id(time), (time, 0))[1] + times

    def _refill(self) -> None:
        """Let READY sequences join the decode group, as far as it, and with a store the device, has room."""
        ready, running = self._ready, self._running
        most = self._b_moe
        if self._lies_elsewhere:
            most = min(most, self._most_on_device)
        page_size = self._plan.page_size
        while ready and len(running) < most:
            one = ready.popleft()
            self.restored += self._weight * one.context if self._lies_elsewhere else 0
            if one.steps == 0:
                self._end(one.held, one.output)
                continue
            self._number += 1
            ends = _Running(
                self._now + one.steps, self._number, one.context + one.steps, one.held, one.whole, one.output
            )
            heappush(running, ends)
            self._context += one.context
            if one.held < one.whole:
                outgrown = self._now + one.held * page_size - one.context
                heappush(self._outgrowing, (outgrown, self._number))

    def _end(self, held: int, output: int) -> None:
        self._held -= held
        self._finished += 1
        self._mean += (output - self._mean) / self._finished

    def _decode(self) -> None:
        """Run the steps up to the next boundary, in runs between which no sequence ends.

        A boundary comes early where waiting sequences could double the group (core/page_boundary.boundary_due). Pages
        of a device before a store can keep groups small for long; early boundaries change little there, and are not
        followed.
        """
        left, running = self._plan.boundary_tokens, self._running
        while left and running:
            steps = min(left, running[0].end - self._now)
            rows = len(running)
            if steps:
                self._add_steps(rows, steps)
                self.steps += steps
                self.rows += steps * rows * self._weight
                self._now, self._context, left = self._now + steps, self._context + steps * rows, left - steps
            while running and running[0].end <= self._now:
                one = heappop(running)
                self._context -= one.context
                self._end(one.held, one.output)
            waiting = len(self._ready) + len(self._queued) + len(self._stalled)
            is_few = 2 * len(running) <= self._b_moe and not self._lies_elsewhere
            if is_few and waiting >= len(running) < rows:
                return

    def _add_steps(self, rows: int, steps: int) -> None:
        """Add equal decode steps. The first one reads the experts again that prefill had no memory for."""
        context = self._context / rows + steps / 2
        rows *= self._weight
        kept_before, self._kept = self._kept, self.kept_share(decode=True)
        if kept_before < self._kept:
            self._add(self._cost.decode(rows, context, kept_before), 1)
            steps -= 1
        self._add(self._cost.decode(rows, context, self._kept), steps)
