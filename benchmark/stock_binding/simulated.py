"""Owns the simulation of stock SGLang: costs of a pass as a line, fitted to batches of equal lengths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sgl_batch.core.plan import PhasePlan, Plan
from sgl_batch.planner.pass_cost import PassTime
from sgl_batch.simulator.instance import Instance
from sgl_batch.simulator.rank import SimulatedRank
from sgl_batch.simulator.requests import Requests
from sgl_batch.simulator.rivals.lazy_pages import LazyPages
from sgl_batch.simulator.rivals.static_binding import PrefillFirst
from sgl_batch.simulator.rivals.token_ratio import TokenRatio
from sgl_batch.simulator.timeline import Account
from sgl_batch.simulator.work import PassWork
from stock_binding.engine_log import Counts
from stock_binding.engines import Lengths, Limits
from stock_binding.workloads import Equal

COUNTED = ("decode step", "decoded row", "token of context", "prefill pass", "prompt token", "pair of prompt tokens")
# Stock's pages and its boundaries on a CPU: each token has a page, and each step may change what runs.
_PAGE = _INTERVAL = 1


@dataclass(frozen=True, slots=True)
class LineCosts:
    """Seconds of each of COUNTED, which a pass adds up; fulfils simulator.work.Costs."""

    seconds: Mapping[str, float]
    sources: Mapping[str, str] = field(default_factory=lambda: {"all": "fitted to batches of equal lengths"})

    def of_pass(self, work: PassWork) -> PassTime:
        decodes = 1 if work.rows and not work.prompt_tokens else 0
        counts = (
            decodes,
            work.rows,
            work.kv_tokens,
            1 if work.prompt_tokens else 0,
            work.prompt_tokens,
            work.prompt_pairs,
        )
        parts = {name: count * self.seconds[name] for name, count in zip(COUNTED, counts, strict=True)}
        seconds = defaultdict(float, parts)
        return PassTime(parts=seconds, bounds=defaultdict(float, compute=sum(parts.values())), bottleneck=COUNTED[0])

    def of_copy(self, tokens: float) -> PassTime:
        raise AssertionError("stock copies no KV")

    def of_move(self, tokens: float) -> PassTime:
        raise AssertionError("a bound sequence does not move")

    def of_boundary(self) -> PassTime:
        """Return no time: bound engines agree on nothing."""
        return PassTime.of(COUNTED[0], 0.0, "compute")


def simulate(lengths: Lengths, limits: Limits, costs: LineCosts) -> tuple[Account, SimulatedRank]:
    """Run a batch on one simulated engine of these limits; return what it took, and its rank with the counts."""
    prompts, outputs = (np.array(column, dtype=np.int64) for column in zip(*lengths, strict=True))
    plan = Plan(
        prefill=PhasePlan(b_attn=limits.chunked_prefill_size, b_moe=limits.chunked_prefill_size),
        decode=PhasePlan(b_attn=limits.max_running_requests, b_moe=limits.max_running_requests),
        page_size=_PAGE,
        boundary_tokens=_INTERVAL,
        refill_watermark=1.0,
        ready_target=limits.max_running_requests,
    )
    rank = SimulatedRank(
        Requests(prompts=prompts, outputs=outputs, most=outputs),
        range(len(lengths)),
        plan,
        LazyPages(limits.max_total_tokens, _PAGE, TokenRatio(), waits_last=True),
        request_slots=limits.max_running_requests,
    )
    return Instance([rank], plan, PrefillFirst(), costs).run(), rank


def counts_in(account: Account, rank: SimulatedRank) -> Counts:
    """Return what a simulated engine did."""
    return Counts(
        prefill_passes=account.groups,
        decode_steps=account.steps,
        decoded_rows=account.rows,
        retracted=rank.tally.suspensions,
        again=rank.tally.again,
    )


def counts(run: Equal, limits: Limits) -> dict[str, float]:
    """Return how many of each of COUNTED a run takes on one engine, whatever they cost."""
    account, _ = simulate(run.lengths, limits, LineCosts(dict.fromkeys(COUNTED, 1.0)))
    return {name: run.times * account.parts[name] for name in COUNTED}


def fit(runs: Sequence[Equal], measured: Sequence[float], limits: Limits) -> tuple[LineCosts, list[float]]:
    """Return the costs that are nearest to measured batches, none below zero, and the relative error of each batch."""
    found = [counts(run, limits) for run in runs]
    relative = np.array([[one[name] for name in COUNTED] for one in found]) / np.array(measured)[:, None]
    seconds = dict(zip(COUNTED, _least_squares(relative).tolist(), strict=True))
    errors = [sum(seconds[name] * one[name] for name in COUNTED) for one in found]
    return LineCosts(seconds), [error / took - 1 for error, took in zip(errors, measured, strict=True)]


def _least_squares(relative: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return factors of the columns, none below zero, with which each row adds up to 1 as nearly as can be.

    The factor that is farthest below zero is left out, until none is.
    """
    scales = relative.max(axis=0)
    kept = list(range(relative.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(relative[:, kept] / scales[kept], np.ones(len(relative)), rcond=None)
        if found.min() >= 0:
            break
        del kept[int(found.argmin())]
    factors = np.zeros(relative.shape[1])
    factors[kept] = found / scales[kept]
    return factors
