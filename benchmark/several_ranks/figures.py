"""Owns the figures of ranks' counters: shares of their time, load of experts, the bound. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_batch.core.answers import EngineStats

# The cost of a boundary: the agreement on actions, the moves, and the batches that are made after it.
_BOUNDARY = ("boundary", "copies")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One engine's run of a workload, and of its longest sequence alone. Times in seconds.

    `ranks`: each rank's counters of the workload; `active`: by moment, seconds since the begin and how many sequences
    each rank decoded; `outputs`: a digest of all tokens; `cores`: those each rank runs on.
    """

    seconds: float
    longest_alone_s: float
    ranks: tuple[EngineStats, ...]
    active: tuple[tuple[float, tuple[float, ...]], ...]
    outputs: str
    cores: tuple[tuple[int, ...], ...]
    peak_rss_bytes: int
    cpus_of_others: float


def share(rank: EngineStats, *parts: str) -> float:
    """Return the share of a rank's time that the parts take."""
    return sum(rank.part_s.get(part, 0.0) for part in parts) / max(sum(rank.part_s.values()), 1e-9)


def stalls_are_counted(ranks: Sequence[EngineStats]) -> bool:
    """Return whether waits for other ranks are counted apart from the exchange itself."""
    return any(rank.part_s.get("stall", 0.0) > 0 for rank in ranks)


def stall_shares(ranks: Sequence[EngineStats]) -> list[float]:
    """Return the share of its time that each rank waited for others, in exchanges and before steps.

    Where it is not counted: what its exchanges and agreements took more than those of the rank with the least, which
    cannot all be their own cost. So much was waited at least.
    """
    if stalls_are_counted(ranks):
        return [share(rank, "stall") for rank in ranks]
    shares = [share(rank, "exchange", "agreement") for rank in ranks]
    return [mine - min(shares) for mine in shares]


def boundary_share(ranks: Sequence[EngineStats]) -> float:
    """Return the largest share of a rank's decode time (without prefill passes and requests) that boundaries take."""
    prefill_s = max(rank.counters.get("prefill_us", 0) for rank in ranks) / 1e6
    shares = []
    for rank in ranks:
        decode_s = sum(rank.part_s.values()) - rank.part_s.get("idle", 0.0) - prefill_s
        shares.append(sum(rank.part_s.get(part, 0.0) for part in _BOUNDARY) / max(decode_s, 1e-9))
    return max(shares)


def imbalance(ranks: Sequence[EngineStats]) -> float:
    """Return the tokens of the most loaded expert over the mean."""
    tokens = [count for rank in ranks for count in rank.tokens_per_expert]
    return max(tokens) * len(tokens) / max(sum(tokens), 1)


def routed_shares(ranks: Sequence[EngineStats]) -> list[float]:
    """Return the share of all routed tokens that each rank's experts compute."""
    tokens = [sum(rank.tokens_per_expert) for rank in ranks]
    return [count / max(sum(tokens), 1) for count in tokens]


def num_moved(ranks: Sequence[EngineStats]) -> int:
    """Return how many times a sequence changed its rank."""
    return round(sum(rank.counters.get("sequences_arrived", 0) for rank in ranks))


def bound_s(one_rank: Run, runs: Sequence[Run], num_ranks: int) -> float:
    """Return the bound of all schedules: all work divided evenly, or the longest sequence at its fastest."""
    return max(one_rank.seconds / num_ranks, min(run.longest_alone_s for run in runs))
