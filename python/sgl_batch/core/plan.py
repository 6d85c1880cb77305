"""Owns the plan: all static choices of a run, and the arithmetic of cutting a group by them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from sgl_batch.config import BatchConfig
from sgl_batch.core.units import FUSED, SPLIT


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """Group limits of one phase: tokens in prefill, sequences in decode (BatchGen 5.1).

    `yield_option`: where sequences yield inside a layer (core/units).
    """

    b_attn: int
    b_moe: int
    yield_option: str = SPLIT

    @property
    def expert_rows(self) -> int:
        """The most rows of one expert call: the group's limit, or a sub-batch's where it yields after its experts."""
        return self.b_moe if self.yield_option == SPLIT else self.b_attn


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All static choices. Sizes are in tokens (prefill, pages, boundary) or sequences (decode, ready).

    `mix_prefill`: prompt tokens that a decode step may take along; 0: none.
    """

    prefill: PhasePlan
    decode: PhasePlan
    page_size: int
    boundary_tokens: int
    refill_watermark: float
    ready_target: int
    share_prefixes: bool = True
    mix_prefill: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def mixed(self) -> PhasePlan:
        """The limits of a decode step that takes prompt tokens along; `b_attn` is that of its sequences."""
        return replace(self.decode, b_moe=self.decode.b_moe + self.mix_prefill)


# Sequences of an attention sub-batch where none are asked for and groups are cut.
B_ATTN_DECODE = 256


def make_plan(
    config: BatchConfig, *, page_size: int, max_running: int, whole_groups: bool = False, dense: bool = False
) -> Plan:
    """Fit the configured choices to what the engine can hold (`max_running` sequences).

    `whole_groups`: a decode group goes through attention as one sub-batch unless its limit is given. `dense`: the model
    has no experts; then a prompt's rows are enough for each weight, and the rows of a decode step are not.
    """
    forward, schedule = config.forward, config.schedule
    b_moe_decode = min(forward.b_moe_decode, max_running)
    b_attn_decode = forward.b_attn_decode or (b_moe_decode if whole_groups else B_ATTN_DECODE)
    decode_option = FUSED if forward.accumulate is False else SPLIT
    prefill_option = FUSED if dense and forward.accumulate is None else decode_option
    ahead = math.ceil(schedule.ready_ahead * b_moe_decode)
    return Plan(
        prefill=PhasePlan(
            b_attn=min(forward.b_attn_prefill, forward.b_moe_prefill),
            b_moe=forward.b_moe_prefill,
            yield_option=prefill_option,
        ),
        decode=PhasePlan(b_attn=min(b_attn_decode, b_moe_decode), b_moe=b_moe_decode, yield_option=decode_option),
        page_size=page_size,
        boundary_tokens=schedule.boundary_tokens,
        refill_watermark=schedule.refill_watermark,
        ready_target=min(b_moe_decode + ahead, max_running),
        share_prefixes=schedule.share_prefixes,
        mix_prefill=schedule.mix_prefill,
    )


def row_spans(num_rows: int, limit: int) -> list[tuple[int, int]]:
    """Cut `num_rows` rows into ceil(num_rows / limit) contiguous spans [start, end) of at most `limit`."""
    assert limit > 0, f"limit {limit} must be positive"
    return [(start, min(start + limit, num_rows)) for start in range(0, num_rows, limit)]


def num_expert_calls(num_rows: int, phase: PhasePlan) -> int:
    """How many expert calls a layer takes for the rows of one rank; at least one."""
    return max(1, len(row_spans(num_rows, phase.expert_rows)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Part of one sequence in an attention sub-batch: rows [start, end) of that sequence's new tokens."""

    index: int
    start: int
    end: int


def cut_sequences(lengths: list[int], span: tuple[int, int]) -> list[Piece]:
    """The pieces of sequences (of `lengths` new tokens each, laid end to end) that lie in rows `span`.

    A sequence that crosses the edge of a span is chunked there, so no row is padded and none wasted.
    """
    pieces, offset = [], 0
    for index, length in enumerate(lengths):
        start, end = max(span[0] - offset, 0), min(span[1] - offset, length)
        if start < end:
            pieces.append(Piece(index=index, start=start, end=end))
        offset += length
        if offset >= span[1]:
            break
    return pieces
