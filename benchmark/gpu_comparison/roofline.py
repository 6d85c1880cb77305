"""Owns the least time that a workload can take: bytes and FLOP of its passes against a machine's rates. Pure.

What is counted is what cannot be left out: weights once a pass, of experts those that the rows choose, KV once,
products, and copies from and to host memory. Activations, launches and sampling are not in it, so no run
reaches it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gpu_comparison.data_sheets import Rates
from gpu_comparison.shapes import ITEM_BYTES, ModelShape

MEMORY, PRODUCTS, COPY_IN, COPY_OUT = "device memory", "products", "copies from the host", "copies to the host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The least work of one forward pass; `times`: how many such passes there are."""

    rows: float
    weight_bytes: float
    kv_bytes: float
    flop: float
    times: float = 1.0

    def seconds(self, rates: Rates) -> dict[str, float]:
        """Return what all these passes need of each resource of the device."""
        memory = (self.weight_bytes + self.kv_bytes) / rates.memory_bytes_per_s
        return {MEMORY: self.times * memory, PRODUCTS: self.times * self.flop / rates.flop_per_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A whole workload: its passes, and the bytes that must be copied from and to host memory."""

    prefill: Pass
    decode: Pass
    copy_in_bytes: float = 0.0
    copy_out_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The least seconds of a workload, and the resource that needs them."""

    seconds: float
    resource: str


def bound_of(work: Work, rates: Rates) -> Bound:
    """Return the least time: passes one after the other, each bounded by one resource, with copies at the same time."""
    totals: dict[str, float] = {MEMORY: 0.0, PRODUCTS: 0.0}
    for one in (work.prefill, work.decode):
        took = one.seconds(rates)
        limiting = max(took, key=lambda name: took[name])
        totals[limiting] += took[limiting]
    device_s = sum(totals.values())
    bounds = [Bound(seconds=device_s, resource=max(totals, key=lambda name: totals[name]))]
    for resource, num_bytes, rate in (
        (COPY_IN, work.copy_in_bytes, rates.copy_in_bytes_per_s),
        (COPY_OUT, work.copy_out_bytes, rates.copy_out_bytes_per_s),
    ):
        if rate is not None:
            bounds.append(Bound(seconds=num_bytes / rate, resource=resource))
    return max(bounds, key=lambda bound: bound.seconds)


def expected_distinct(shape: ModelShape, rows: float) -> float:
    """Estimate the experts of a layer that `rows` rows choose if all choices are equally likely."""
    return shape.experts * (1.0 - math.pow(1 - shape.top_k / shape.experts, rows))


def decode_pass(
    shape: ModelShape, *, rows: float, context: float, distinct: float, times: float, calls: float = 1.0
) -> Pass:
    """Return a decode step of `rows` sequences of `context` tokens, with `distinct` experts in each call of a layer."""
    return Pass(
        rows=rows,
        weight_bytes=_weight_bytes(shape, calls * distinct),
        kv_bytes=rows * context * shape.kv_token_bytes,
        flop=rows * (shape.token_flop + shape.head_flop + context * shape.attention_flop),
        times=times,
    )


def prefill_pass(shape: ModelShape, prompts: Sequence[int], *, group_tokens: int) -> Pass:
    """Return the mean prefill group of prompts of these lengths, in groups of at most `group_tokens` tokens."""
    tokens = sum(prompts)
    groups = max(1, -(-tokens // group_tokens))
    rows = tokens / groups
    # A token attends to itself and the tokens before it: half of a square.
    attended = sum(length * (length + 1) / 2 for length in prompts) / groups
    flop = rows * shape.token_flop + attended * shape.attention_flop + len(prompts) / groups * shape.head_flop
    return Pass(
        rows=rows,
        weight_bytes=_weight_bytes(shape, expected_distinct(shape, rows)),
        kv_bytes=rows * shape.kv_token_bytes,
        flop=flop,
        times=groups,
    )


def _weight_bytes(shape: ModelShape, distinct: float) -> float:
    """Return the weights that a pass reads: all except the embeddings, of which it reads rows, and unused experts."""
    embeddings = shape.vocabulary * shape.hidden * ITEM_BYTES
    others = shape.weight_bytes - shape.all_expert_bytes - embeddings
    return others + shape.layers * distinct * shape.expert_bytes
