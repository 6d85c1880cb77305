"""Decides which candidates a search tries: sizes of groups and sub-batches, forms of KV, and what is pinned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sgl_batch.config import BatchConfig
from sgl_batch.core.plan import B_ATTN_DECODE
from sgl_batch.planner.candidate import DEVICE, EXCLUSIVE, INCLUSIVE, RESIDENT, STREAMED, Candidate
from sgl_batch.planner.cost_model import CostModel
from sgl_batch.planner.model_layers import MOE, ModelLayers
from sgl_batch.planner.pass_cost import PassCost
from sgl_batch.planner.workload import Workload, first_group, followed

_SUB_BATCH_TOKENS = (256, 512, 1024, 2048, 4096)
_GROUP_TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
_GROUP_ROWS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_SUB_BATCH_ROWS = (64, 256)
_PREFILL_KEPT = 3
# Predictions that are closer than this are equal: the plan that takes less memory is taken.
EQUAL = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What the search may choose.

    Attributes:
        kv, weights: Where KV may lie, and how weights may be kept.
        most_running: Sequences of the largest decode group.
        page_size: Tokens of a page.
        cores: Of a CPU; 0 on a GPU.
        base: All other settings.
        pinned: Limits, `accumulate`, and settings of the interval, that every candidate has.
        most: The largest values of limits.
        intervals: Whether the interval and the sequences prefilled ahead are chosen too.
    """

    kv: Sequence[str] = (DEVICE,)
    weights: Sequence[str] = (RESIDENT,)
    most_running: int = max(_GROUP_ROWS)
    page_size: int = 64
    cores: int = 0
    base: BatchConfig = field(default_factory=BatchConfig)
    pinned: Mapping[str, Any] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)
    intervals: bool = False

    def sizes(self, name: str, usual: Sequence[int]) -> Sequence[int]:
        """Return the values of a limit."""
        if name in self.pinned:
            return (int(self.pinned[name]),)
        most = self.most.get(name, max(usual))
        return tuple(sorted({min(size, most) for size in usual}))


def candidates(workload: Workload, costs: CostModel, model: ModelLayers, allowed: Allowed) -> Iterator[Candidate]:
    """Yield every candidate: the few best prefill limits with all decode limits."""
    kinds: tuple[bool | None, ...] = (None, False) if MOE in model.layers else (None, True, False)
    if "accumulate" in allowed.pinned:
        kinds = (allowed.pinned["accumulate"],)
    decode = list(_decode_limits(workload, allowed))
    for weights in allowed.weights:
        for accumulate in kinds:
            prefill = _prefill_limits(workload, costs, model, allowed, weights=weights, accumulate=accumulate)
            for b_attn_prefill, b_moe_prefill in prefill:
                for kv in allowed.kv:
                    for b_attn, b_moe in decode:
                        yield Candidate(
                            b_attn_prefill=b_attn_prefill,
                            b_moe_prefill=b_moe_prefill,
                            b_attn_decode=b_attn,
                            b_moe_decode=b_moe,
                            accumulate=accumulate,
                            kv=kv,
                            weights=weights,
                        )


def _decode_limits(workload: Workload, allowed: Allowed) -> Iterator[tuple[int, int]]:
    """Yield b_attn and b_moe of decode. A b_attn of 0 is the engine's own on a CPU."""
    most = min(allowed.most_running, _GROUP_ROWS[-1])
    rows = allowed.sizes("b_moe_decode", sorted({*(size for size in _GROUP_ROWS if size < most), most}))
    pinned = int(allowed.pinned.get("b_attn_decode", 0))
    rows = [size for size in rows if size >= pinned]
    # A group larger than the batch is the batch.
    rows = [size for index, size in enumerate(rows) if index == 0 or rows[index - 1] < workload.count]
    for b_moe in rows:
        usual = allowed.sizes("b_attn_decode", (*_SUB_BATCH_ROWS, b_moe))
        usual = (pinned or B_ATTN_DECODE,) if "b_attn_decode" in allowed.pinned else usual
        for b_attn in sorted({min(size, b_moe) for size in usual}):
            yield b_attn, b_moe


def _prefill_limits(
    workload: Workload,
    costs: CostModel,
    model: ModelLayers,
    allowed: Allowed,
    *,
    weights: str,
    accumulate: bool | None,
) -> list[tuple[int, int]]:
    """Return the limits with the fastest prefill by token, and the smallest ones, which leave the most memory.

    With streamed weights: the fastest where all experts stay in memory, and where none do.
    """
    kept_shares = (0.0,) if weights == RESIDENT else (0.0, 1.0)
    timed: list[list[tuple[float, tuple[int, int]]]] = [[] for _ in kept_shares]
    prompts = [request.prompt for request in followed(workload, _GROUP_TOKENS[-1]).requests]
    sub_batches = allowed.sizes("b_attn_prefill", _SUB_BATCH_TOKENS)
    least = 1 if "b_moe_prefill" in allowed.pinned else sub_batches[0]
    for b_moe in allowed.sizes("b_moe_prefill", [size for size in _GROUP_TOKENS if size >= least]):
        group = first_group(prompts, b_moe)
        for b_attn in sorted({min(size, b_moe) for size in sub_batches}):
            candidate = Candidate(
                b_attn_prefill=b_attn,
                b_moe_prefill=b_moe,
                b_attn_decode=1,
                b_moe_decode=1,
                accumulate=accumulate,
                weights=weights,
            )
            cost = PassCost(costs, model, candidate, cores=allowed.cores)
            for found, kept in zip(timed, kept_shares, strict=True):
                found.append((cost.prefill(group, kept).seconds / sum(group), (b_attn, b_moe)))
    least_memory = min((limits for _, limits in timed[0]), key=lambda limits: (limits[1], limits[0]))
    return list(dict.fromkeys([*(limits for found in timed for limits in _fastest(found)), least_memory]))


def _fastest(timed: Sequence[tuple[float, tuple[int, int]]]) -> list[tuple[int, int]]:
    """Return the limits of the least seconds; of limits that are as fast, the smaller ones."""
    fastest = min(seconds for seconds, _ in timed)
    near = sorted((limits[1], limits[0]) for seconds, limits in timed if seconds <= fastest * (1 + EQUAL))
    ordered = [(b_attn, b_moe) for b_moe, b_attn in near] + [limits for _, limits in sorted(timed)]
    return ordered[:_PREFILL_KEPT]


def kv_forms(*, store_bytes: int, mode: str, decode_kv: str = "auto") -> tuple[str, ...]:
    """Return where KV may lie with a host store of so many bytes, and the mode and place that were asked for."""
    if not store_bytes:
        return (DEVICE,)
    stores = (INCLUSIVE, EXCLUSIVE) if mode == "auto" else (mode,)
    streamed = () if mode == EXCLUSIVE else (STREAMED,)  # an exclusive store has no KV that is on the device
    return {"resident": stores, "streamed": streamed}.get(decode_kv, (*stores, *streamed))
