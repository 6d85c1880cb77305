"""Predicts when a batch is done: adds up the times of the passes of a followed run, and what a longer batch adds."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sgl_batch.core.plan import Plan
from sgl_batch.planner.candidate import DEVICE, EXCLUSIVE
from sgl_batch.planner.followed_run import RESERVE, FollowedRun, Room
from sgl_batch.planner.pass_cost import INTAKE, PassCost, PassTime
from sgl_batch.planner.roofline import OVERHEAD
from sgl_batch.planner.workload import Followed, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """How closely a batch is followed.

    In a batch of more than `followed` requests, each that is followed stands for several, as long as the decode group
    still has `lanes` of them. The middle of what is left is one long steady state.
    """

    followed: int
    lanes: int


FINE, COARSE = Detail(followed=2048, lanes=64), Detail(followed=512, lanes=16)


@dataclass(slots=True, kw_only=True)
class Prediction:
    """The predicted run of a batch. `parts`: seconds by part; `bottlenecks`: seconds by what passes mostly waited for.

    `hideable_s`: waits for copies that two groups by turns would hide. `bounds`: seconds by what bounds them: memory,
    compute, copies, exchange, fixed overhead.

    `steps`, `rows`: decode steps, and the rows of all of them together; `groups`: prefill groups. `kept`: the share of
    streamed experts that stays in memory during decode, at the end.
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
    kept: float = 0.0

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
            **({"experts_kept": round(self.kept, 3)} if self.kept else {}),
        }

    def add(self, time: PassTime, times: float) -> None:
        """Add a time that comes `times` times."""
        seconds = times * time.seconds
        self.seconds += seconds
        self.hideable_s += times * time.hideable_s
        self.bottlenecks[time.bottleneck] += seconds
        for mine, its in ((self.parts, time.parts), (self.bounds, time.bounds)):
            for name, value in its.items():
                mine[name] += times * value

    def plus(self, other: Prediction, times: float) -> Prediction:
        """Return this one and `times` the other one."""
        made = Prediction(kept=self.kept)
        for name in ("seconds", "hideable_s", "prefill_s", "steps", "rows", "groups"):
            setattr(made, name, getattr(self, name) + times * getattr(other, name))
        for name in ("parts", "bottlenecks", "bounds"):
            mine, its = getattr(self, name), getattr(other, name)
            setattr(made, name, defaultdict(float, {part: mine[part] + times * its[part] for part in {**mine, **its}}))
        return made


def predict(
    batch: Followed, plan: Plan, cost: PassCost, room: Room, kv: str, *, admission: str = RESERVE, detail: Detail = FINE
) -> Prediction | None:
    """Return the run of a batch, or None where a sequence can never fit.

    Args:
        batch: The batch.
        plan: The engine's plan.
        cost: The seconds of passes.
        room: The pages of KV that fit.
        kv: Where KV lies (planner/candidate).
        admission: The policy by which sequences reserve pages.
        detail: How many sequences are followed.
    """
    count = batch.workload.count
    weight = max(min(-(-count // detail.followed), plan.decode.b_moe // detail.lanes), 1)
    follow = partial(_predict_followed, plan=plan, cost=cost, room=room, kv=kv, admission=admission, weight=weight)
    some = batch.at_most(min(round(count / weight), detail.followed))
    whole = follow(some)
    left = count / weight - len(some.requests)
    if whole is None or left < 1:
        return whole
    fewer = batch.at_most(len(some.requests) // 2)
    half = follow(fewer)
    assert half is not None, "what fits all fits some"
    # What the second half of those followed adds is what each further half adds: start and end happen once.
    return whole.plus(whole.plus(half, -1.0), left / (len(some.requests) - len(fewer.requests)))


def _predict_followed(
    workload: Workload, *, plan: Plan, cost: PassCost, room: Room, kv: str, admission: str, weight: int
) -> Prediction | None:
    run = FollowedRun(workload, plan, cost, room, kv, admission=admission, weight=weight)
    if any(run.whole_pages(one.prompt, one.output) > run.largest for one in workload.requests):
        return None
    run.follow()
    found = Prediction(steps=run.steps, rows=run.rows, groups=run.groups, kept=run.kept_share(decode=True))
    for time, times in run.prefills.values():
        found.prefill_s += times * time.seconds
        found.add(time, times)
    found.prefill_s += run.intake_s
    found.add(PassTime.of(INTAKE, run.intake_s, OVERHEAD), 1)
    for time, times in run.steps_of.values():
        found.add(time, times)
    if run.restored:
        found.add(cost.restore(run.restored), 1)
    on_device = 0 if kv in (DEVICE, EXCLUSIVE) else min(run.most_held, room.device)
    found.add(cost.new_memory((run.most_held + on_device) * plan.page_size), 1)
    return found
