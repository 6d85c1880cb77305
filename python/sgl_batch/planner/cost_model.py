"""Fits a profile: seconds of the parts of a layer and of a step by rows and context, in forms with few parameters.

A module's seconds are a roofline divided by an efficiency (planner/roofline). Attention has a second term, proportional
to the KV that is read, with a slope that depends on the rows in the same way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sgl_batch.errors import ConfigError
from sgl_batch.planner.model_layers import ModelLayers
from sgl_batch.planner.roofline import COMPUTE, MEMORY, TINY_S, Count, Knots, Roofline, fit_roofline, middle
from sgl_batch.planner.samples import PassSample, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCost:
    """Seconds of a layer's attention for a sub-batch: of its rows, and of the tokens of KV that these look at.

    `looking`: what bounds the second term: in decode MEMORY, which KV is read from, in prefill COMPUTE.
    """

    of_rows: Roofline
    slope: Knots
    looking: str = MEMORY

    def at(self, rows: float, looked_at: float) -> float:
        """Return the seconds. `looked_at`: tokens of KV, summed over the rows."""
        return self.of_rows.at(rows) + self.slope.at(rows) * looked_at if rows > 0 else 0.0

    def bounds(self, rows: float, looked_at: float) -> dict[str, float]:
        """Return the seconds by what bounds them."""
        found = self.of_rows.bounds(rows)
        return {**found, self.looking: found.get(self.looking, 0.0) + self.slope.at(rows) * looked_at}


def fit_attention(
    samples: Iterable[tuple[float, float, float]], bytes_of: Count, work_of: Count, *, looking: str = MEMORY
) -> AttentionCost:
    """Fit (rows, tokens looked at, seconds): two or more of the latter with the same rows give the slope there."""
    by_rows: defaultdict[float, list[tuple[float, float]]] = defaultdict(list)
    for rows, looked_at, seconds in samples:
        by_rows[rows].append((looked_at, seconds))
    slopes = {rows: found for rows, points in by_rows.items() if (found := _slope(points)) is not None}
    if not slopes:
        slopes = {next(iter(by_rows)): TINY_S**2}
    slope = Knots(tuple(sorted(slopes.items())))
    left = []
    for rows, points in by_rows.items():
        # At least a tenth is of the rows: a slope that noise made steep must not leave less than nothing.
        left += [(rows, max(seconds - slope.at(rows) * looked, seconds / 10)) for looked, seconds in points]
    return AttentionCost(of_rows=fit_roofline(left, bytes_of, work_of), slope=slope, looking=looking)


def _slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the slope between the points of least and most tokens; None where noise hides it, or there is none."""
    x0, x1 = min(points)[0], max(points)[0]
    y0, y1 = (middle([y for x, y in points if x == end]) for end in (x0, x1))
    return (y1 - y0) / (x1 - x0) if x1 > x0 and y1 > y0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of a step beside attention, router and experts.

    Attributes:
        decode: Of a decode step by rows, in the cut model that was profiled.
        further_layers_s: What the model's other layers add to each pass.
        sequence_s: Of a prompt's intake.
        group_s: Of a prefill group.
    """

    decode: Roofline
    sequence_s: float
    group_s: float
    further_layers_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCost:
    """Seconds in which a rank exchanges its rows with other ranks in a layer, there and back.

    Attributes:
        row_bytes: Bytes that a row sends to other ranks in one direction, or, where it is more, gets from them.
        bytes_per_s: Of one rank in one direction.
        fixed_s: Of the calls, whatever their size.
        kinds: The kinds of layers that exchange rows.
        label: Over what, and where the rate is from.
    """

    row_bytes: float
    bytes_per_s: float
    fixed_s: float
    kinds: frozenset[str]
    label: str

    def at(self, rows: float) -> float:
        """Return the seconds for so many rows of each rank."""
        return self.fixed_s + self.row_bytes * rows / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of what a forward pass consists of.

    Attributes:
        decode_attention, prefill_attention: Of one layer.
        router, experts: Of one layer, by the layer's kind. A dense layer's MLP is its experts.
        pass_s: What attention takes once a pass, whatever the layers.
        step: What surrounds the layers.
        rates: Bytes a second of copies, as measured.
        exchange: With other ranks; None for one rank.
    """

    decode_attention: AttentionCost
    prefill_attention: AttentionCost
    router: Mapping[str, Roofline]
    experts: Mapping[str, Roofline]
    pass_s: float
    step: StepCost
    rates: Mapping[str, float]
    exchange: ExchangeCost | None = None


def looked_at(sample: PassSample) -> float:
    """Return the tokens of KV that the rows of a pass look at, summed over the rows."""
    if sample.decode:
        return float(sample.sequences * (sample.tokens + 1))
    return sample.sequences * sample.tokens * (sample.tokens + 1) / 2


def fit(profile: Profile, model: ModelLayers) -> CostModel:
    """Fit a profile of a model. Raises ConfigError for one without samples of a phase."""
    for decode in (True, False):
        if not any(sample.decode is decode for sample in profile.passes):
            phase = "decode" if decode else "prefill"
            raise ConfigError(f"the profile has no {phase} group; make another with sgl-batch plan --profile")
    pass_s = fixed_pass_s(profile.passes)
    passes = [_Layer(sample, pass_s) for sample in _most_layers(profile.passes)]
    kinds = {sample.kind for sample in profile.passes}
    return CostModel(
        decode_attention=_attention([one for one in passes if one.sample.decode], model, MEMORY),
        prefill_attention=_attention([one for one in passes if not one.sample.decode], model, COMPUTE),
        router={kind: _of_rows(passes, kind, lambda one: one.router_s) for kind in kinds},
        experts={
            kind: fit_roofline(
                [(one.sample.rows, one.experts_s) for one in passes if one.sample.kind == kind],
                model.expert_bytes(kind),
                model.expert_work(kind),
            )
            for kind in kinds
        },
        pass_s=pass_s,
        step=_step(profile, model),
        rates=profile.rates,
    )


def _most_layers(passes: Sequence[PassSample]) -> list[PassSample]:
    """Return, of the samples of a size, those that ran with most layers: the timer and the pass weigh least in them."""
    most: dict[object, int] = {}
    for one in passes:
        size = one.decode, one.sequences, one.tokens, one.kind
        most[size] = max(most.get(size, 0), one.layers)
    return [one for one in passes if one.layers == most[one.decode, one.sequences, one.tokens, one.kind]]


@dataclass(frozen=True, slots=True)
class _Layer:
    """A sample's seconds by layer."""

    sample: PassSample
    pass_s: float

    @property
    def attention_s(self) -> float:
        return max(self.sample.attention_s - self.pass_s, self.sample.attention_s / 10) / self.sample.layers

    @property
    def router_s(self) -> float:
        return self.sample.router_s / self.sample.layers

    @property
    def experts_s(self) -> float:
        return self.sample.experts_s / self.sample.layers


def fixed_pass_s(passes: Iterable[PassSample]) -> float:
    """Return what attention takes once a pass: what one layer takes more than its share of several."""
    lines = _by_layers(passes, lambda sample: sample.attention_s)
    return max(middle([once for once, _ in lines]), 0.0) if lines else 0.0


def _by_layers(passes: Iterable[PassSample], seconds: Callable[[PassSample], float]) -> list[tuple[float, float]]:
    """Return, for each size that ran with few layers and with more, the seconds of a pass without layers and of one."""
    by_size: defaultdict[object, dict[int, float]] = defaultdict(dict)
    for sample in passes:
        by_size[sample.decode, sample.sequences, sample.tokens, sample.kind][sample.layers] = seconds(sample)
    found = []
    for taken in by_size.values():
        least, most = min(taken), max(taken)
        if least < most:
            each = (taken[most] - taken[least]) / (most - least)
            found.append((taken[least] - least * each, each))
    return found


def _attention(passes: Sequence[_Layer], model: ModelLayers, looking: str) -> AttentionCost:
    points = [(float(one.sample.rows), looked_at(one.sample), one.attention_s) for one in passes]
    num_bytes = model.attention_bytes
    return fit_attention(points, lambda _: num_bytes, lambda rows: num_bytes * rows, looking=looking)


def _of_rows(passes: Sequence[_Layer], kind: str, seconds: Callable[[_Layer], float]) -> Roofline:
    """Fit a module of which nothing is counted: a fixed time and a time by row."""
    points = [(float(one.sample.rows), seconds(one)) for one in passes if one.sample.kind == kind]
    return fit_roofline(points, lambda _: 1.0, lambda rows: rows, is_counted=False)


def _further_layers_s(passes: Sequence[PassSample], model: ModelLayers) -> float:
    """Return what a pass takes outside its parts for the layers that the cut model lacks."""
    lines = _by_layers(passes, lambda sample: sample.rest_s)
    layers: dict[str, int] = {}
    for sample in passes:
        layers[sample.kind] = max(layers.get(sample.kind, 0), sample.layers)
    each = max(middle([each for _, each in lines]), 0.0) if lines else 0.0
    return each * max(model.num_layers - sum(layers.values()), 0)


def _step(profile: Profile, model: ModelLayers) -> StepCost:
    decode = [(float(one.rows), one.seconds) for one in profile.steps if one.decode]
    # Without an engine's steps: what a pass takes beside its layers, which leaves out scheduling and sampling.
    passes = [(float(one.sequences), one.rest_s) for one in profile.passes if one.decode]
    intake = sorted((one.rows, one.seconds) for one in profile.steps if not one.decode)
    sequence_s = group_s = 0.0
    if len(intake) > 1:
        (few, few_s), (many, many_s) = intake[0], intake[-1]
        sequence_s = max(many_s - few_s, 0.0) / (many - few)
        group_s = max(few_s - few * sequence_s, 0.0)
    around = fit_roofline(decode or passes, lambda _: 1.0, lambda rows: rows, is_counted=False)
    further_s = _further_layers_s(profile.passes, model)
    return StepCost(decode=around, sequence_s=sequence_s, group_s=group_s, further_layers_s=further_s)
