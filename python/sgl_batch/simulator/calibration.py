"""Finds the one number that measured runs give: the fixed seconds of a pass, for each GPU and engine.

Nothing else is fitted. The seconds are such that predicted and measured times agree on average, as the mean of the
logarithms of their ratios; what single runs are off by is the residual.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sgl_batch.simulator.best import best_of
from sgl_batch.simulator.cluster.assumed import Assumed
from sgl_batch.simulator.cluster.deployment import deployment
from sgl_batch.simulator.cluster.hardware import Cluster
from sgl_batch.simulator.cluster.models import ClusterModel
from sgl_batch.simulator.policies import Policy
from sgl_batch.simulator.requests import Requests
from sgl_batch.simulator.run import Setup, simulate

_MOST_S, _STEPS = 10.0, 30
_CLOSE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A measured run: where, of what, by which policy, and its seconds. `name`: of its place in the file."""

    name: str
    cluster: Cluster
    model: ClusterModel
    policy: Policy
    requests: Requests
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """What the cells of a GPU and a policy give.

    Attributes:
        gpu, policy: Of the cells.
        step_s: The fixed seconds of a pass.
        ratios: By cell, predicted seconds over measured ones, with these.
        is_bound: Whether no fixed seconds explain the cells: predictions are too long without any, or too short with
            the most of them that are tried.
    """

    gpu: str
    policy: str
    step_s: float
    ratios: dict[str, float]
    is_bound: bool


def calibrated(cells: Sequence[Cell]) -> list[Calibrated]:
    """Return the fixed seconds of each GPU and policy that cells are of. Raises ConfigError for what fits nowhere."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.cluster.sheet.name, cell.policy.name), []).append(cell)
    return [_fit(gpu, policy, group) for (gpu, policy), group in groups.items()]


def with_calibration(policy: Policy, gpu: str, found: Sequence[Calibrated]) -> Policy:
    """Return the policy with the fixed seconds that were found for it on a GPU, or as it is."""
    for one in found:
        if (one.gpu, one.policy) == (gpu, policy.name):
            step_s = Assumed(one.step_s, one.step_s, one.step_s, f"calibrated by {len(one.ratios)} measured runs")
            return replace(policy, engines=tuple(replace(engine, step_s=step_s) for engine in policy.engines))
    return policy


def _fit(gpu: str, policy: str, cells: Sequence[Cell]) -> Calibrated:
    setups = [
        best_of(cell.policy, cell.model, cell.cluster, cell.requests, collapse=True).result.setup for cell in cells
    ]

    def ratios(step_s: float) -> dict[str, float]:
        return {
            cell.name: simulate(_with_step(setup, step_s), cell.requests, collapse=True).seconds / cell.seconds
            for cell, setup in zip(cells, setups, strict=True)
        }

    step_s = _bisected(lambda seconds: sum(math.log(ratio) for ratio in ratios(seconds).values()))
    return Calibrated(gpu=gpu, policy=policy, step_s=step_s, ratios=ratios(step_s), is_bound=step_s in (0.0, _MOST_S))


def _with_step(setup: Setup, step_s: float) -> Setup:
    one = setup.deployment
    engine = replace(one.engine, step_s=Assumed(step_s, step_s, step_s))
    return replace(setup, deployment=deployment(one.model, one.cluster, engine, one.layout, one.regime))


def _bisected(error: Callable[[float], float]) -> float:
    """Return where a function that grows is zero, between 0 and the most; an end where it is not."""
    low, high = 0.0, _MOST_S
    if error(low) >= 0:
        return low
    if error(high) <= 0:
        return high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        found = error(middle)
        if abs(found) < _CLOSE:
            return middle
        low, high = (middle, high) if found < 0 else (low, middle)
    return (low + high) / 2
