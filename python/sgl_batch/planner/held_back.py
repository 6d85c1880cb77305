"""Owns what a profile says about its own fit: passes of sizes that are held back, predicted by a fit of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sgl_batch.errors import ConfigError
from sgl_batch.planner.cost_model import CostModel, fit, looked_at
from sgl_batch.planner.model_layers import ModelLayers
from sgl_batch.planner.samples import PassSample, Profile

LAYERS = "layers"
_FITS = 3


@dataclass(frozen=True, slots=True)
class HeldBack:
    """A pass that was measured and not fitted, with its seconds by part; LAYERS is the sum of the parts."""

    sample: PassSample
    measured: dict[str, float]
    predicted: dict[str, float]

    def ratio(self, part: str = LAYERS) -> float:
        """Return the measured seconds of a part over the predicted ones."""
        return self.measured[part] / self.predicted[part]


def held_back(profile: Profile, model: ModelLayers) -> list[HeldBack]:
    """Return the passes of all sizes but the smallest and the largest, each held back in one of three fits.

    Empty where the profile has too few sizes for a fit without a third of them.
    """
    found = []
    for first in range(_FITS):
        sizes = _sizes(profile, first)
        kept = replace(profile, passes=tuple(one for one in profile.passes if (one.decode, one.rows) not in sizes))
        try:
            costs = fit(kept, model)
        except ConfigError:
            return []
        found += [_beside(costs, one) for one in profile.passes if (one.decode, one.rows) in sizes]
    return found


def usual_ratios(passes: Sequence[HeldBack], share: float = 0.8) -> tuple[float, float]:
    """Return the lowest and the highest measured over predicted time of the middle share of the passes; not empty."""
    ratios = sorted(one.ratio() for one in passes)
    outside = int((1 - share) / 2 * len(ratios))
    return ratios[outside], ratios[-1 - outside]


def _sizes(profile: Profile, first: int) -> set[tuple[bool, int]]:
    """Return every third number of rows of each phase, from the `first` on, without the smallest and the largest."""
    found: set[tuple[bool, int]] = set()
    for decode in (True, False):
        rows = sorted({sample.rows for sample in profile.passes if sample.decode is decode})
        found |= {(decode, one) for one in rows[1:-1][first::_FITS]}
    return found


def _beside(costs: CostModel, sample: PassSample) -> HeldBack:
    attention = costs.decode_attention if sample.decode else costs.prefill_attention
    predicted = {
        "attention": costs.pass_s + sample.layers * attention.at(sample.rows, looked_at(sample)),
        "router": sample.layers * costs.router[sample.kind].at(sample.rows),
        "experts": sample.layers * costs.experts[sample.kind].at(sample.rows),
    }
    measured = {"attention": sample.attention_s, "router": sample.router_s, "experts": sample.experts_s}
    return HeldBack(sample, *({**parts, LAYERS: sum(parts.values())} for parts in (measured, predicted)))
