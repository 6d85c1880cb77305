"""Asks the simulator what the same pass and the same batch take, with tables of kernels and by the roofline alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from beside.cases import Case, Pass
from sgl_batch.simulator.cluster.deployment import Deployment, deployment
from sgl_batch.simulator.policies import Choice, policies_named
from sgl_batch.simulator.requests import Requests
from sgl_batch.simulator.run import Setup, simulate
from sgl_batch.simulator.work import PassWork, pairs_of

# SGLang's chunk for each rank; its limit on sequences is above what is compared.
_CHOICE = Choice(rows=4096, chunk=8192)


def deployment_of(case: Case, *, tables: bool) -> Deployment:
    """Return the deployment of a case. Raises ConfigError where the model does not fit."""
    return deployment(case.model, case.cluster, case.settings, case.ranks, tables=tables)


def seconds_of(one: Deployment, work: Pass) -> Mapping[str, float]:
    """Return the seconds of a pass by part, with the same work on all ranks that have sequences of their own."""
    count = work.count
    if work.phase == "prefill":
        tokens = count * work.length
        pairs = count * pairs_of(work.length)
        found = PassWork(prompts=count, prompt_tokens=tokens, prompt_pairs=pairs, all_rows=tokens * one.ranks)
    else:
        found = PassWork(rows=count, kv_tokens=count * work.length, all_rows=count * one.ranks)
    return one.costs.of_pass(found).parts


def batch_seconds(one: Deployment, count: int, prompt: int, output: int) -> float:
    """Return the seconds of a batch of so many sequences of each rank under the decisions of SGLang."""
    (policy,) = policies_named("sglang")
    number = count * one.ranks
    prompts, outputs = (np.full(number, length, dtype=np.int64) for length in (prompt, output))
    requests = Requests(prompts=prompts, outputs=outputs, most=outputs)
    return simulate(Setup(policy=policy, deployment=one, choice=_CHOICE), requests, collapse=True).seconds
