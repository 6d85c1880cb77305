"""Decides how much of a device's memory budget is left for KV pages, and whether that is enough. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.core.page_ledger import pages_for
from sgl_batch.core.plan import Plan
from sgl_batch.core.residency import FREE_PAGES
from sgl_batch.errors import ConfigError

# What the heap keeps of freed memory, and what threads and libraries take over time.
_SLACK_BYTES = 64 << 20
_STAGED_LAYERS = 2
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of a model that its working memory depends on.

    attention_width: numbers that attention computes for a row: queries, keys and values of all heads.
    dense_width: width of the widest MLP that all rows go through, or of the shared experts.
    item_bytes: bytes of one number of a hidden state.
    """

    hidden: int
    vocabulary: int
    layers: int
    attention_width: int
    experts: int
    top_k: int
    expert_width: int
    dense_width: int
    item_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNeeds:
    """Bytes that a device holds besides KV pages, and bytes of one page in all layers.

    `reserves`: further reserves by name (gpu_reserves; on a CPU, partition_memory).
    """

    program: int
    weights: int
    working: int
    page: int
    reserves: Mapping[str, int] = field(default_factory=dict)


def working_bytes(
    plan: Plan, shape: ModelShape, *, max_running: int, page_bytes: int, staged: bool, by_torch: bool, num_ranks: int
) -> int:
    """Return an upper bound in bytes of what a forward pass of the plan's largest groups takes besides weights and KV.

    `staged`: whether prefill groups have two layers of KV in pages of their own. `by_torch`: whether torch's operators
    compute the experts, with copies of all routed rows. Prompts longer than a group take more.
    """
    rows = max(plan.prefill.b_moe, plan.mixed.b_moe) if plan.mix_prefill else plan.prefill.b_moe
    sequences = min(rows, max_running)
    working = pass_bytes(
        shape, rows=rows, sequences=sequences, b_attn=plan.prefill.b_attn, by_torch=by_torch, num_ranks=num_ranks
    )
    pages = pages_for(rows, plan.page_size) + sequences if staged else 0
    return working + _STAGED_LAYERS * pages * page_bytes // shape.layers


def pass_bytes(
    shape: ModelShape,
    *,
    rows: int,
    sequences: int,
    b_attn: int,
    by_torch: bool = False,
    num_ranks: int = 1,
    greedy: bool = False,
) -> int:
    """Return an upper bound in bytes of what a forward pass of `rows` tokens takes besides weights and KV.

    `sequences`: those whose logits are computed. `greedy`: no token is sampled; sampling takes the probabilities of
    all tokens.
    """
    item = shape.item_bytes
    # Hidden states and residuals: the layer's input, the accumulation buffer, the combined rows, and sums in float32.
    group = rows * shape.hidden * (6 * item + _FLOAT_BYTES)
    attention = min(b_attn, rows) * (2 * shape.attention_width + 3 * shape.hidden) * item
    experts = expert_call_bytes(shape, rows=rows, by_torch=by_torch)
    dense = 3 * rows * shape.dense_width * item
    exchange = 0 if num_ranks == 1 else num_ranks * rows * shape.hidden * (item + _FLOAT_BYTES)
    layer = group + max(attention, experts + exchange, dense)
    logits = sequences * shape.vocabulary * (item + (1 if greedy else 2) * _FLOAT_BYTES)
    # The heap keeps pieces of freed memory, so that logits cannot reuse all memory of the layers: both count.
    return layer + logits + _SLACK_BYTES


def expert_call_bytes(shape: ModelShape, *, rows: int, by_torch: bool = False) -> int:
    """Return an upper bound in bytes of what the router and one call of the experts take for `rows` tokens."""
    routed = rows * shape.top_k * (shape.expert_width * shape.item_bytes + 24)
    if by_torch:
        routed += rows * shape.top_k * (3 * shape.hidden + 2 * shape.expert_width) * _FLOAT_BYTES
    return routed + 2 * rows * shape.experts * _FLOAT_BYTES


def kv_bytes(budget: int, needs: DeviceNeeds, plan: Plan) -> int:
    """Return the bytes that a budget leaves for KV pages.

    Raises ConfigError if running sequences would lack their free pages.
    """
    # One extra page takes the writes of padded rows.
    left = budget - needs.program - needs.weights - needs.working - needs.page - sum(needs.reserves.values())
    least = FREE_PAGES * plan.decode.b_moe
    if left >= least * needs.page:
        return left
    whole = budget - left + least * needs.page
    kept = {**({"the program": needs.program} if needs.program else {}), **needs.reserves}
    listed = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in kept.items())
    raise ConfigError(
        f"device_memory is {format_bytes(budget)}, and {format_bytes(whole)} are needed: {listed}, weights "
        f"{format_bytes(needs.weights)}, groups of {plan.prefill.b_moe} prompt tokens and their logits "
        f"{format_bytes(needs.working)}, and {FREE_PAGES} pages of KV for each of {plan.decode.b_moe} running "
        f"sequences {format_bytes(least * needs.page)}; raise --device-memory, or lower "
        f"--b-moe-decode{_most_running(left, needs)}, --b-moe-prefill or --max-running-requests"
    )


def _most_running(left: int, needs: DeviceNeeds) -> str:
    most = left // (FREE_PAGES * needs.page)
    return f" to {most}" if most >= 1 else ""
