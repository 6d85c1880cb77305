"""Makes an instance of a policy on a deployment: its ranks, its pool, and the forms for its last sequences."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_batch.errors import ConfigError
from sgl_batch.simulator.cluster.deployment import Deployment, tensor_parallel
from sgl_batch.simulator.collapsed import Collapsed
from sgl_batch.simulator.instance import Instance
from sgl_batch.simulator.node_pool import NodePool
from sgl_batch.simulator.partition import TailForms
from sgl_batch.simulator.policies import REQUEST_SLOTS, Choice, Policy
from sgl_batch.simulator.rank import SimulatedRank
from sgl_batch.simulator.requests import Requests
from sgl_batch.simulator.work import Costs


def make_instance(
    policy: Policy,
    deployment: Deployment,
    choice: Choice,
    requests: Requests,
    numbers: Sequence[int],
    *,
    collapse: bool,
) -> Instance:
    """Return an instance of a deployment with sequences of these numbers, dealt to its ranks by turns.

    `collapse`: simulate the first rank alone, with its part of the sequences.
    """
    deployment = deployment.for_rows(choice.rows)
    plan, dealt = choice.plan(), deployment.ranks
    ranks = [
        SimulatedRank(requests, numbers[rank::dealt], plan, policy.form(deployment), request_slots=REQUEST_SLOTS)
        for rank in range(1 if collapse else dealt)
    ]
    costs: Costs = Collapsed(deployment.costs, dealt) if collapse else deployment.costs
    return Instance(
        ranks,
        plan,
        policy.scheduler(ranks[0].form, choice),
        costs,
        pool=NodePool(deployment.cluster.node_gpus) if policy.pools and not collapse else None,
        long_tail=long_tail(deployment, alike=dealt if collapse else 1) if policy.partitions else None,
    )


def long_tail(deployment: Deployment, *, alike: int = 1) -> TailForms | None:
    """Return what is compared for the last sequences of an instance; None where it has no form to change into.

    Sets are the ranks of a node each, or all ranks. `alike`: for how many ranks a simulated one stands.
    """
    ranks, found = deployment.ranks, dict[int, tuple[Costs, int]]()
    for size in sorted({min(ranks, deployment.cluster.node_gpus), ranks}):
        if size < 2 or ranks % size:
            continue
        try:
            shared = tensor_parallel(deployment, size)
        except ConfigError:
            continue
        found[size] = (shared.costs, shared.device_tokens)
    change_s = deployment.engine.partition_s.best
    return TailForms.of(ranks, deployment.costs, found, change_s=change_s, alike=alike) if found else None
