"""Scales the costs of a profile by what a run has measured, part by part. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sgl_batch.planner.cost_model import AttentionCost, CostModel, StepCost
from sgl_batch.planner.pass_cost import COPIES, INTAKE, STEP, WEIGHTS, PassCost
from sgl_batch.planner.roofline import Knots, Roofline

ATTENTION, ROUTER, EXPERTS = "attention", "router", "experts"
# The parts whose costs are scaled. `step` is all that the others leave: scheduling, logits, sampling, messages, intake.
PARTS = (ATTENTION, ROUTER, EXPERTS, STEP, COPIES, WEIGHTS)
# A part that is a smaller share of the time says too little about its cost.
_LEAST_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The passes that an engine computed in some time, and what they took.

    Attributes:
        steps, rows: Decode steps, and the rows of all of them together.
        looked_at: Tokens of KV that these rows looked at, all together.
        groups, tokens: Prefill groups, and the tokens of all of them together.
        prompt: Tokens of a prompt on average.
        part_s: Seconds by part, of the engine's clock (`PARTS`), without those in which there was nothing to do.
    """

    steps: float
    rows: float
    looked_at: float
    groups: float
    tokens: float
    prompt: float
    part_s: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Return the seconds of all parts."""
        return sum(self.part_s.values())


def predicted_parts(measured: Measured, cost: PassCost) -> dict[str, float]:
    """Return the seconds by part that `cost` predicts for the passes that were measured.

    All steps count as one with the mean rows and the mean context, and all groups as the mean group.
    """
    parts: defaultdict[str, float] = defaultdict(float)
    if measured.steps and measured.rows:
        step = cost.decode(max(round(measured.rows / measured.steps), 1), measured.looked_at / measured.rows)
        for name, seconds in step.parts.items():
            parts[name] += measured.steps * seconds
    if measured.groups and measured.tokens:
        tokens = measured.tokens / measured.groups
        prompts = max(round(tokens / max(measured.prompt, 1.0)), 1)
        group = cost.prefill([max(round(tokens / prompts), 1)] * prompts)
        for name, seconds in group.parts.items():
            parts[name] += measured.groups * seconds
    parts[STEP] += parts.pop(INTAKE, 0.0)
    return {name: parts[name] for name in PARTS}


def cost_factors(measured: Measured, predicted: Mapping[str, float]) -> dict[str, float]:
    """Return how many times as long as predicted each part took; 1 for a part that is too small to say."""
    whole_s, predicted_s = measured.seconds, sum(predicted.values())
    factors = {}
    for name in PARTS:
        took_s, expected_s = measured.part_s.get(name, 0.0), predicted[name]
        says_much = took_s > _LEAST_SHARE * whole_s and expected_s > _LEAST_SHARE * predicted_s
        factors[name] = took_s / expected_s if says_much else 1.0
    return factors


def scaled(costs: CostModel, factors: Mapping[str, float]) -> CostModel:
    """Return the costs with each part so many times as long."""
    rates = {"copy": factors[COPIES], "disk": factors[WEIGHTS]}
    return replace(
        costs,
        decode_attention=_attention(costs.decode_attention, factors[ATTENTION]),
        prefill_attention=_attention(costs.prefill_attention, factors[ATTENTION]),
        router={kind: _roofline(cost, factors[ROUTER]) for kind, cost in costs.router.items()},
        experts={kind: _roofline(cost, factors[EXPERTS]) for kind, cost in costs.experts.items()},
        pass_s=costs.pass_s * factors[ATTENTION],
        step=_step(costs.step, factors[STEP]),
        rates={name: rate / rates.get(name, 1.0) for name, rate in costs.rates.items()},
    )


def _attention(cost: AttentionCost, factor: float) -> AttentionCost:
    return replace(cost, of_rows=_roofline(cost.of_rows, factor), slope=_knots(cost.slope, factor))


def _step(cost: StepCost, factor: float) -> StepCost:
    return StepCost(
        decode=_roofline(cost.decode, factor),
        sequence_s=cost.sequence_s * factor,
        group_s=cost.group_s * factor,
        further_layers_s=cost.further_layers_s * factor,
    )


def _roofline(cost: Roofline, factor: float) -> Roofline:
    return replace(cost, efficiency=_knots(cost.efficiency, 1 / factor))


def _knots(knots: Knots, factor: float) -> Knots:
    return Knots(tuple((rows, value * factor) for rows, value in knots.points))
