"""Measures a sequence's migration to another rank of the machine, as benchmark/migration.py does, by context.

KV goes from memory to memory, over gloo; on a GPU ranks would exchange it over NCCL, which is not measured here. With a
host KV store that ranks share, a sequence moves by its blocks' numbers, without a copy.
"""

from __future__ import annotations

import argparse

import migration
from gpu_comparison.shapes import ModelShape

from primitive_costs.timing import Cost

_SEQUENCES = 4


def measure(shape: ModelShape, *, contexts: list[int], page_size: int, rounds: int) -> list[Cost]:
    """Measure the time of a sequence and of a page, of several that move at once."""
    costs = []
    for context in contexts:
        pages = -(-context // page_size)
        options = argparse.Namespace(
            sequences=_SEQUENCES,
            pages=pages,
            page_size=page_size,
            layers=shape.layers,
            heads=shape.kv_heads,
            head_dim=shape.head_dim,
            rounds=rounds,
        )
        seconds = migration.measure(options)
        for unit, parts in (("a sequence", _SEQUENCES), (f"a page of {page_size} tokens", _SEQUENCES * pages)):
            costs.append(
                Cost(
                    category="migrate",
                    operation=f"KV to another process over gloo, {_SEQUENCES} sequences at once",
                    unit=unit,
                    samples_s=tuple(one / parts for one in seconds),
                    context=context,
                )
            )
    return costs
