"""Asks a Ray cluster what a run needs to know: the resources of its nodes, and the plan of an engine on one of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import ray

from sgl_batch.config import BatchConfig
from sgl_batch.control_plane.data.cpu_share import share_of_actor

logger = logging.getLogger(__name__)

# An engine's plan is asked for before the run; a cluster that is busy answers late.
_PLAN_S = 120.0


def nodes() -> list[dict[str, float]]:
    """Return the resources of each node that is alive, by Ray's names ("CPU", "GPU")."""
    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def decode_group(arguments: Mapping[str, Any], cpus: float, *, on_gpu: bool) -> int:
    """Return how many sequences an engine with these arguments decodes together, `b_moe_decode` of its plan.

    Where it is not given, and the engine runs on CPUs, a node of the cluster plans: it has the model and its profile.
    """
    given = arguments.get("b_moe_decode")
    if isinstance(given, int):
        return max(given, 1)
    default = BatchConfig().forward.b_moe_decode
    if on_gpu or arguments.get("plan") == "off":  # plans are of CPUs so far (startup/plan_inputs.py)
        return default
    task = ray.remote(num_cpus=cpus, max_retries=0)(_planned_group).remote(dict(arguments))
    try:
        return int(ray.get(task, timeout=_PLAN_S))
    except (ray.exceptions.RayError, TimeoutError) as error:
        ray.cancel(task, force=True)
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        logger.warning("the engine's plan is not known, so its groups are taken to be of %d: %s", default, reason[0])
        return default


def _planned_group(arguments: dict[str, Any]) -> int:
    """Return the planned group on this node, with the CPUs that this task has. It runs in a task of Ray's."""
    from sgl_batch.config import split_kwargs
    from sgl_batch.startup.plan_inputs import plan_start

    share = share_of_actor(ray.get_runtime_context().get_assigned_resources())
    if share is not None:
        share.bind()
    try:
        config, rest = split_kwargs(arguments)
        plan = plan_start(config, arguments.keys() - rest.keys(), rest, on_cpu=True)
        return plan.config.forward.b_moe_decode
    finally:
        if share is not None:
            share.release()
