"""Finds the best layout, regime and limits of a policy on a cluster, by simulating the candidates that come close.

Candidates are first compared by an estimate without a schedule; those that come close are simulated with one rank for
all of an instance; the best of these are simulated whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sgl_batch.errors import ConfigError
from sgl_batch.simulator.cluster.deployment import Deployment, feasible
from sgl_batch.simulator.cluster.hardware import Cluster
from sgl_batch.simulator.cluster.models import ClusterModel
from sgl_batch.simulator.lengths import are_alike
from sgl_batch.simulator.policies import INTERVAL, Policy
from sgl_batch.simulator.requests import Requests
from sgl_batch.simulator.run import Result, Setup, Split, simulate
from sgl_batch.simulator.work import PassWork

# GPUs of a unit that prefills or decodes alone.
_UNIT_GPUS = 16
# Candidates whose estimate is so much longer than the shortest are not simulated; nor are more than so many.
_CLOSE, _MOST, _WHOLE = 1.5, 6, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best run of a policy, and the other candidates that were simulated, from the fastest.

    `table`: the runs of units, by ratio. `compared`: how many candidates fit.
    """

    result: Result
    others: Sequence[Result] = ()
    table: Sequence[Result] = ()
    compared: int = 1


def best_of(
    policy: Policy,
    model: ClusterModel,
    cluster: Cluster,
    requests: Requests,
    *,
    collapse: bool = False,
    until: float = math.inf,
) -> Best:
    """Return the best run of a policy. Raises ConfigError where it fits in no layout and regime.

    `collapse`, `until`: as in `run.simulate`.
    """
    if policy.units:
        return _best_ratio(policy, model, cluster, requests)
    deployments = _feasible(policy, model, cluster)
    if policy.gpus is not None and not deployments:
        raise ConfigError(_no_layout(policy, policy.gpus, model, cluster))
    candidates = list(_setups(policy, deployments, requests))
    if not candidates:
        raise ConfigError(f"{model.title} does not fit {cluster.name} in any layout and regime of {policy.title}")
    close = _close(candidates, requests)
    ranked = sorted((simulate(one, requests, collapse=True, until=until) for one in close), key=_order)
    if collapse:
        return Best(result=ranked[0], others=ranked[1:], compared=len(candidates))
    if are_alike(requests):
        chosen = ranked[:1]
    else:
        chosen = [ranked[number] for number in _first_of_each_kind([one.setup for one in ranked], _WHOLE)]
    whole = sorted((_whole(one, requests, until) for one in chosen), key=_order)
    others = [one for one in ranked if not any(one is other for other in chosen)]
    return Best(result=whole[0], others=[*whole[1:], *others], compared=len(candidates))


def _no_layout(policy: Policy, gpus: int, model: ClusterModel, cluster: Cluster) -> str:
    """Return why no instance of so many GPUs is on a cluster."""
    others = sorted({one.layout.ranks for one in _feasible(replace(policy, gpus=None), model, cluster)})
    fits = f"those that fit have {' or '.join(map(str, others))}" if others else "no other number fits either"
    return (
        f"an instance of {gpus} GPUs, as {policy.name}:{gpus} asks for, fits in no layout of {model.title} on the "
        f"{cluster.gpus} of {cluster.name}; {fits}"
    )


def _first_of_each_kind(setups: Sequence[Setup], count: int) -> list[int]:
    """Return so many numbers of setups: of each way in which prompts are computed the first one, then the first others.

    How much ranks wait for each other's prompts is seen in none but a whole simulation.
    """
    firsts: dict[tuple[int, bool], int] = {}
    for number, one in enumerate(setups):
        firsts.setdefault((one.choice.chunk, one.choice.together), number)
    more = [number for number in range(len(setups)) if number not in firsts.values()]
    return sorted([*firsts.values(), *more[: max(count - len(firsts), 0)]])


def _whole(result: Result, requests: Requests, until: float) -> Result:
    return simulate(result.setup, requests, until=until) if result.collapsed else result


def _order(result: Result) -> tuple[float, float]:
    """Return what ranks runs: those that are stopped, by what they have finished by then."""
    return -result.counts.finished, result.seconds


def _feasible(policy: Policy, model: ClusterModel, cluster: Cluster) -> list[Deployment]:
    found = [one for engine in policy.engines for one in feasible(model, cluster, engine)]
    return [one for one in found if policy.gpus in (None, one.layout.ranks)]


def _setups(policy: Policy, deployments: Sequence[Deployment], requests: Requests) -> Iterator[Setup]:
    prompt = float(requests.prompts.mean())
    whole = prompt + float(requests.outputs.mean())
    longest = int((requests.prompts + requests.most).max())
    for one in deployments:
        if longest + one.sequence_tokens <= one.running_tokens:
            for choice in policy.choices(one, prompt, whole):
                if choice.together and are_alike(requests):
                    continue  # all ranks have prompts at the same time
                yield Setup(policy=policy, deployment=one, choice=choice)


def _close(candidates: Sequence[Setup], requests: Requests) -> list[Setup]:
    """Return the candidates whose estimate comes close to the shortest."""
    estimated = sorted(((estimate(one, requests), number) for number, one in enumerate(candidates)))
    limit = _CLOSE * estimated[0][0]
    close = [candidates[number] for seconds, number in estimated if seconds <= limit]
    return [close[number] for number in _first_of_each_kind(close, _MOST)]


def estimate(setup: Setup, requests: Requests) -> float:
    """Return the seconds of a batch without a schedule: prompts in full passes, then decode of full groups."""
    one, costs = setup.deployment, setup.deployment.costs
    prompt, output = float(requests.prompts.mean()), float(requests.outputs.mean())
    share = len(requests) / (one.instances * one.ranks)
    fits = one.running_tokens / (prompt + output + one.sequence_tokens)
    rows = max(1, round(min(share, setup.choice.rows, fits)))
    tokens = max(1, min(setup.choice.chunk, round(share * prompt)))
    context = prompt if tokens >= prompt else prompt / 2
    prefill = costs.of_pass(
        PassWork(
            prompts=max(1, round(tokens / prompt)),
            prompt_tokens=tokens,
            prompt_pairs=round(tokens * context / (1 if tokens < prompt else 2)),
            all_rows=tokens * one.ranks,
        )
    )
    decode = costs.of_pass(
        PassWork(rows=rows, kv_tokens=round(rows * (prompt + output / 2)), all_rows=rows * one.ranks)
    )
    step_s = decode.seconds + costs.of_boundary().seconds / INTERVAL
    return prefill.seconds * max(1.0, share * prompt) / tokens + step_s * output * max(1.0, share / rows)


def _best_ratio(policy: Policy, model: ClusterModel, cluster: Cluster, requests: Requests) -> Best:
    unit_gpus = policy.gpus or _UNIT_GPUS
    count = cluster.gpus // unit_gpus
    if count < 2 or cluster.gpus % unit_gpus:
        raise ConfigError(
            f"{cluster.name} has {cluster.gpus} GPUs, which are not several units of {unit_gpus} GPUs for prefill and "
            f"decode; say how many a unit has, as in {policy.name}:8"
        )
    unit = replace(cluster, gpus=unit_gpus)
    single = [one for one in _feasible(policy, model, unit) if one.instances == 1]
    candidates = list(_setups(policy, single, requests))
    if not candidates:
        raise ConfigError(
            f"{model.title} does not fit {unit_gpus} {cluster.sheet.name} in any layout of {policy.title}"
        )
    setup = min(candidates, key=lambda one: estimate(one, requests))
    table = [
        simulate(replace(setup, split=Split(prefill=prefill, decode=count - prefill)), requests)
        for prefill in range(1, count)
    ]
    ranked = sorted(table, key=_order)
    return Best(result=ranked[0], others=ranked[1:], table=table, compared=len(candidates) * len(table))
