"""Owns the lengths of a simulated batch that are not given one by one: as many alike, or spread about means."""

from __future__ import annotations

import math

import numpy as np

from sgl_batch.planner.workload import Workload
from sgl_batch.simulator.requests import Numbers, Requests

_SEED = 0


def requests_like(workload: Workload, count: int, *, cv: float = 0.0) -> Requests:
    """Return so many requests of a workload, in its order and again from its first.

    Those that are not all of it, but a part, are spaced evenly by length, so that they have its mix.

    `cv`: the standard deviation of lengths over their mean. Prompts and outputs are each multiplied by a number from a
    log-normal distribution of mean 1, independently, always by the same ones.

    Each sequence may generate as many tokens as the longest of all: users give a batch one limit.
    """
    lengths = np.array([(one.prompt, one.output) for one in workload.requests], dtype=np.int64)
    times, rest = divmod(count, len(lengths))
    lengths = np.concatenate([np.tile(lengths, (times, 1)), lengths[_mixed(lengths, rest)]])
    if cv:
        lengths = _spread(lengths, cv)
    outputs = lengths[:, 1]
    return Requests(prompts=lengths[:, 0], outputs=outputs, most=np.full(count, outputs.max(), dtype=np.int64))


def _mixed(lengths: Numbers, count: int) -> Numbers:
    """Return the numbers of so many requests that are spaced evenly by length, in their order."""
    by_length = np.lexsort((lengths[:, 0], lengths[:, 1]))
    ranks = ((2 * np.arange(count) + 1) * len(lengths) - 1) // (2 * max(count, 1))
    return np.sort(by_length[ranks])


def _spread(lengths: Numbers, cv: float) -> Numbers:
    sigma = math.sqrt(math.log1p(cv * cv))
    factors = np.random.default_rng(_SEED).lognormal(-sigma * sigma / 2, sigma, lengths.shape)
    return np.maximum(np.rint(lengths * factors), 1).astype(np.int64)


def are_alike(requests: Requests) -> bool:
    """Return whether all requests have the same lengths."""
    return bool(np.ptp(requests.prompts) == 0 and np.ptp(requests.outputs) == 0)
