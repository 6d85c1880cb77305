"""Owns how far a simulated time depends on what is assumed.

Each assumed number of the cluster and the engine is moved to its low and its high end, one at a time, and the same
setup is simulated again, with one rank for all of an instance, and of long batches with every n-th request. Deviations
are combined as if they were independent: the root of the sum of the squares of their logarithms, for longer and for
shorter times by themselves.

In the ratio of two policies a number that both assume alike is moved in both at once, so that it mostly cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from sgl_batch.errors import ConfigError
from sgl_batch.planner.layouts import Layout
from sgl_batch.simulator.best import Best, estimate
from sgl_batch.simulator.cluster.assumed import ENDS, Assumed
from sgl_batch.simulator.cluster.deployment import deployment
from sgl_batch.simulator.cluster.regime import Regime
from sgl_batch.simulator.requests import Requests
from sgl_batch.simulator.run import Setup, simulate

# Where the estimate changes by less, it is taken for the change.
_LITTLE = 1e-3
# Sequences of a rank with which times are compared: so many times those that run at once, and at least so many.
_TIMES, _LEAST = 5, 150
# Another regime that is so little faster is not told apart.
_SAME = 1.005
Factors = Mapping[tuple[str, str], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """How long a run takes where what is assumed is otherwise.

    Attributes:
        low, high: Seconds.
        factors: By name and end of an assumed number, the seconds over those of the best guesses.
        known: The numbers that were moved, by name.
        flips: Names of the numbers with an end at which another layout or regime is faster, or this one does not fit.
    """

    low: float
    high: float
    factors: Factors
    known: Mapping[str, Assumed]
    flips: tuple[str, ...] = ()

    def strongest(self, count: int) -> list[str]:
        """Return the names of the numbers that change the time most."""
        size = {name: max(abs(math.log(self.factors.get((name, end), 1.0))) for end in ENDS) for name in self.known}
        return sorted((name for name in size if size[name] > _LITTLE), key=lambda name: -size[name])[:count]


def interval_of(best: Best, requests: Requests) -> Interval:
    """Return how long the best run takes where each assumed number is at its ends."""
    result, others = best.result, best.others
    other = next((one for one in others if _regime(one.setup) != _regime(result.setup)), None)
    rival = other.setup if other and result.setup.split is None else None
    part = _part(result.setup, requests)
    base, rival_base = _seconds(result.setup, part), other.seconds if other else math.inf
    factors, known, flips = dict[tuple[str, str], float](), dict[str, Assumed](), list[str]()
    for name, end, value, change in _variants(result.setup):
        known[name] = value
        try:
            changed = change(result.setup)
        except ConfigError:
            flips.append(f"{name} {end}")
            continue
        ratio = estimate(changed, requests) / estimate(result.setup, requests)
        factors[name, end] = ratio if abs(ratio - 1) < _LITTLE else _seconds(changed, part) / base
        if rival is not None:
            theirs = rival_base * _ratio(change, rival, requests)
            if theirs * _SAME < result.seconds * factors[name, end]:
                flips.append(f"{name} {end}")
    low, high = _combined(factors.values())
    return Interval(
        low=result.seconds * low, high=result.seconds * high, factors=factors, known=known, flips=tuple(flips)
    )


def ratio_interval(ours: tuple[float, Interval], theirs: tuple[float, Interval]) -> tuple[float, float]:
    """Return the lowest and the highest ratio of their seconds to ours."""
    (our_s, mine), (their_s, other) = ours, theirs
    shared = {name for name, value in mine.known.items() if other.known.get(name) == value}
    factors = []
    for key in {*mine.factors, *other.factors}:
        up, down = other.factors.get(key, 1.0), mine.factors.get(key, 1.0)
        factors += [up / down] if key[0] in shared else [up, 1 / down]
    low, high = _combined(factors)
    return their_s / our_s * low, their_s / our_s * high


def _regime(setup: Setup) -> tuple[str, Layout, Regime]:
    return setup.deployment.engine.name, setup.deployment.layout, setup.deployment.regime


def _part(setup: Setup, requests: Requests) -> Requests:
    """Return a batch, or every n-th request of it, as far as that is long enough to compare times."""
    one = setup.deployment
    share = len(requests) / (one.instances * one.ranks)
    at_once = one.running_tokens / float((requests.prompts + requests.outputs).mean())
    enough = max(_LEAST, _TIMES * at_once)
    return requests.every(max(1, int(share / enough)))


def _seconds(setup: Setup, requests: Requests) -> float:
    return simulate(setup, requests, collapse=True).seconds


def _ratio(change: Callable[[Setup], Setup], setup: Setup, requests: Requests) -> float:
    try:
        return estimate(change(setup), requests) / estimate(setup, requests)
    except ConfigError:
        return math.inf


def _variants(setup: Setup) -> Iterator[tuple[str, str, Assumed, Callable[[Setup], Setup]]]:
    """Yield each assumed number at each end where it differs, and how a setup becomes one with it."""
    one = setup.deployment
    for where, owner in (("cluster", one.cluster), ("engine", one.engine)):
        for name, value in owner.assumed().items():
            for end in ENDS:
                if value.moved(end).best != value.best:
                    yield name, end, value, _change(where, name, end)


def _change(where: str, name: str, end: str) -> Callable[[Setup], Setup]:
    def change(setup: Setup) -> Setup:
        one = setup.deployment
        cluster, engine = one.cluster, one.engine
        if where == "cluster":
            cluster = replace(cluster, **{name: cluster.assumed()[name].moved(end)})  # type: ignore[arg-type]
        else:
            engine = replace(engine, **{name: engine.assumed()[name].moved(end)})  # type: ignore[arg-type]
        changed = deployment(one.model, cluster, engine, one.layout, one.regime)
        rows = max(1, round(setup.choice.rows * changed.running_tokens / one.running_tokens))
        return replace(setup, deployment=changed, choice=replace(setup.choice, rows=rows))

    return change


def _combined(factors: Iterable[float]) -> tuple[float, float]:
    """Return the shortest and the longest time over the best guess, of factors that are independent."""
    logs = [math.log(factor) for factor in factors]
    down, up = (math.sqrt(sum(log * log for log in logs if (log > 0) is longer)) for longer in (False, True))
    return math.exp(-down), math.exp(up)
