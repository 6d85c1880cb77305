"""Merges the statistics of several ranks into one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sgl_batch.core.answers import EngineStats

# All ranks count these alike, because they take every step together. Other counters are each rank's own.
_COMMON = ("boundaries", "decode_steps", "expert_calls", "prefill_us")


def merged_stats(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the ranks' statistics as one: sums of counters, and means of times.

    Steps that all ranks take together are counted once. Memory is that of the rank with the most: shared memory counts
    in each rank, so a sum would be too large. All ranks share one store: its state is the one with the most free pages,
    which the last rank saw after the others had freed theirs.
    """
    if len(ranks) == 1:
        return dict(ranks[0])
    ordered = sorted(ranks, key=lambda rank: rank["rank"])
    counters: Counter[str] = Counter()
    sequences: Counter[str] = Counter()
    for rank in ordered:
        counters.update(rank["counters"])
        sequences.update(rank["sequences"])
    for name in _COMMON:
        if name in counters:
            counters[name] = max(rank["counters"].get(name, 0) for rank in ordered)
    parts = ordered[0]["part_s"]
    return {
        **ordered[0],
        "counters": dict(counters),
        "sequences": dict(sequences),
        "part_s": {part: sum(rank["part_s"][part] for rank in ordered) / len(ordered) for part in parts},
        "tokens_per_expert": [tokens for rank in ordered for tokens in rank["tokens_per_expert"]],
        "free_pages": sum(rank["free_pages"] for rank in ordered),
        "total_pages": sum(rank["total_pages"] for rank in ordered),
        "memory": max((rank["memory"] for rank in ordered), key=lambda memory: memory["peak_bytes"]),
        "cpu": {name: sum(rank["cpu"][name] for rank in ordered) for name in ordered[0]["cpu"]},
        "store": max((rank["store"] for rank in ordered), key=lambda store: store.get("free_pages", 0)),
        "ranks": ordered,
    }


def engine_stats(stats: dict[str, Any]) -> EngineStats:
    """Return the statistics of an engine or a rank as EngineStats."""
    return EngineStats(
        counters=stats["counters"],
        part_s=stats["part_s"],
        tokens_per_expert=stats["tokens_per_expert"],
        sequences=stats["sequences"],
        ranks=tuple(engine_stats(rank) for rank in stats.get("ranks", ())),
        peak_memory_bytes=stats["memory"]["peak_bytes"],
        memory_budget_bytes=stats["memory"]["budget_bytes"],
        forward=stats["forward"],
        overflow_directory=stats["overflow_directory"],
    )
