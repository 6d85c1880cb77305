"""Makes what `sgl-batch simulate` says as plain data: times with their intervals, ratios, parts, and sources."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.cli.simulate.subject import Subject
from sgl_batch.simulator.best import Best
from sgl_batch.simulator.calibration import Calibrated
from sgl_batch.simulator.cluster.assumed import ASSUMED
from sgl_batch.simulator.cluster.hardware import Cluster
from sgl_batch.simulator.intervals import Interval, ratio_interval
from sgl_batch.simulator.policies import Policy
from sgl_batch.simulator.rank import Tally
from sgl_batch.simulator.requests import Requests
from sgl_batch.simulator.run import Result
from sgl_batch.simulator.timeline import Account

COUNTED, MODELLED = "counted", "modelled"
_STRONGEST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A policy, and its best run, or why there is none. `interval`: None where it was not asked for."""

    policy: Policy
    best: Best | None = None
    interval: Interval | None = None
    why: str = ""


def subject_message(subject: Subject) -> dict[str, Any]:
    """Return what is simulated."""
    model, cluster, requests = subject.model, subject.cluster, subject.requests
    sheet = cluster.sheet
    return {
        "model": {"name": model.name, "title": model.title, "source": model.source},
        "hardware": {
            "name": cluster.name,
            "gpu": sheet.name,
            "gpus": cluster.gpus,
            "gpus_per_node": cluster.node_gpus,
            "memory_bytes": sheet.usable_bytes,
            "memory_bytes_per_s": sheet.memory_bytes_per_s,
            "host_memory_bytes": cluster.host_memory_bytes,
            "link_bytes_per_s": cluster.link_bytes_per_s,
            "network_bytes_per_s": cluster.network_bytes_per_s.best,
            "host": cluster.says,
            "source": sheet.source,
            "text": _cluster_text(cluster),
        },
        "workload": workload_message(requests, subject.spread),
    }


def _cluster_text(cluster: Cluster) -> str:
    return (
        f"{cluster.gpus} {cluster.sheet.name} with {format_bytes(int(cluster.sheet.usable_bytes))} each, "
        f"{cluster.node_gpus} a node with {format_bytes(int(cluster.host_memory_bytes))}; between nodes "
        f"{cluster.network_bytes_per_s.best / 1e9:.3g} GB/s a GPU. {cluster.says}"
    )


def workload_message(requests: Requests, spread: float) -> dict[str, Any]:
    """Return the batch. `spread`: the standard deviation of lengths over their means."""
    return {
        "requests": len(requests),
        "prompt_tokens": int(requests.prompts.sum()),
        "output_tokens": int(requests.outputs.sum()),
        "longest": int((requests.prompts + requests.outputs).max()),
        "limit": int(requests.most.max()),
        "cv": spread,
        "source": COUNTED,
    }


def policies_message(compared: Sequence[Compared], *, until: float = math.inf) -> list[dict[str, Any]]:
    """Return each policy with its run; ratios are to the first that runs.

    There are none of runs that `until` stopped: they took as long as each other, and differ in what has ended.
    """
    first = next((one for one in compared if one.best is not None), None)
    whole = all(one.best.result.seconds < until for one in compared if one.best is not None)
    return [_policy_message(one, first if whole else None) for one in compared]


def _policy_message(one: Compared, first: Compared | None) -> dict[str, Any]:
    head: dict[str, Any] = {"name": one.policy.name, "title": one.policy.title, "says": one.policy.says}
    if one.best is None:
        return {**head, "why": one.why}
    result = one.best.result
    message = {**head, **run_message(result), "compared": one.best.compared}
    if one.best.table:
        message["table"] = [
            {"text": run.setup.split.text(), "seconds": round(run.seconds, 3), "idle": round(run.idle, 4)}
            for run in one.best.table
            if run.setup.split is not None
        ]
    message["others"] = [
        {"text": run.setup.text(), "seconds": round(run.seconds, 3), "collapsed": run.collapsed}
        for run in one.best.others
    ]
    if one.interval is not None:
        message["interval"] = _interval_message(one.interval)
    if first is not None and first.best is not None and one is not first:
        message["ratio"] = round(result.seconds / first.best.result.seconds, 4)
        if one.interval is not None and first.interval is not None:
            ends = ratio_interval((first.best.result.seconds, first.interval), (result.seconds, one.interval))
            message["ratio_interval"] = [round(end, 4) for end in ends]
    return message


def run_message(result: Result) -> dict[str, Any]:
    """Return the numbers of a run."""
    return {
        **account_message(result.account, result.counts, idle=result.idle),
        "setup": result.setup.text(),
        "instances": result.instances,
        **({"problems_at_once": result.rounds.at_once} if result.rounds else {}),
        "notes": result.notes,
        "sources": dict(result.setup.deployment.costs.sources),
        "source": MODELLED,
    }


def account_message(account: Account, counts: Tally, *, idle: float) -> dict[str, Any]:
    """Return what a run took. `counts`, `idle`: of all instances; `account`: of the one that ends last."""
    return {
        "seconds": round(account.seconds, 6),
        "tokens_per_s": round(counts.output_tokens / max(account.seconds, 1e-12), 1),
        "idle": round(idle, 4),
        "counts": asdict(counts),
        "partitioned": None if account.partitioned is None else asdict(account.partitioned),
        "steps": account.steps,
        "mean_rows": round(account.rows / max(account.steps, 1), 1),
        "parts_s": _longest_first(account.parts),
        "bounds_s": _longest_first(account.bounds),
        "timeline": account.timeline.as_dict(),
    }


def _longest_first(seconds: Mapping[str, float]) -> dict[str, float]:
    found = sorted(seconds.items(), key=lambda item: -item[1])
    return {name: round(value, 6) for name, value in found if value > 0}


def _interval_message(interval: Interval) -> dict[str, Any]:
    strongest = []
    for name in interval.strongest(_STRONGEST):
        value = interval.known[name]
        strongest.append(
            {
                "name": name,
                "best": value.best,
                "low": value.low,
                "high": value.high,
                "why": value.why,
                "factors": [round(interval.factors.get((name, end), 1.0), 4) for end in ("low", "high")],
                "source": ASSUMED,
            }
        )
    return {
        "low_s": round(interval.low, 3),
        "high_s": round(interval.high, 3),
        "flips": list(interval.flips),
        "moved": len(interval.known),
        "strongest": strongest,
    }


def calibration_message(found: Sequence[Calibrated]) -> list[dict[str, Any]]:
    """Return what the cells gave."""
    return [
        {
            "gpu": one.gpu,
            "policy": one.policy,
            "step_s": round(one.step_s, 6),
            "ratios": {name: round(ratio, 4) for name, ratio in one.ratios.items()},
            "is_bound": one.is_bound,
        }
        for one in found
    ]
