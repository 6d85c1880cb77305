"""Owns the plan: all static choices of a run, and the arithmetic that cuts groups by them.

A plan is fixed while it is in force. `plan_in_force` replaces it as a whole, between two steps.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from sgl_batch.config import BatchConfig
from sgl_batch.core.units import FUSED, SPLIT


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """Group limits of one phase, in tokens (prefill) or sequences (decode) (BatchGen 5.1).

    b_attn: the most of one attention sub-batch.
    b_moe: the most of one group, which one expert call combines.
    yield_option: where sequences yield inside a layer: SPLIT or FUSED (core/units).
    """

    b_attn: int
    b_moe: int
    yield_option: str = SPLIT

    @property
    def expert_rows(self) -> int:
        """The most rows of one expert call: the group's limit, or a sub-batch's if sub-batches are not combined."""
        return self.b_moe if self.yield_option == SPLIT else self.b_attn


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All static choices of a run.

    prefill: limits of a prefill group, in tokens.
    decode: limits of a decode group, in sequences; `decode.b_moe` is the most that run at once.
    page_size: tokens of a KV page.
    boundary_tokens: decode steps between boundaries.
    refill_watermark: prefill begins when running and ready sequences are fewer than this share of `decode.b_moe`.
    ready_target: prefill, once begun, goes on until so many sequences run or are ready.
    share_prefixes: whether prompts share pages with which they begin.
    mix_prefill: prompt tokens that a decode step may compute as well; 0 for none.
    partition_below: where no modelled cost is known, the last sequences are partitioned over ranks when at most so
        many are left on all ranks; 0 for never.
    partition_least_tokens: and only if one of them is expected to generate at least so many tokens yet.
    partition_prompt_tokens: all ranks compute a prompt of at least so many tokens together, where only one of them has
        a prompt to compute; 0 for never.
    """

    prefill: PhasePlan
    decode: PhasePlan
    page_size: int
    boundary_tokens: int
    refill_watermark: float
    ready_target: int
    share_prefixes: bool = True
    mix_prefill: int = 0
    partition_below: int = 0
    partition_least_tokens: int = 512
    partition_prompt_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, as records and manifests hold it."""
        return asdict(self)

    @property
    def mixed(self) -> PhasePlan:
        """The limits of a decode step with prompt tokens; `b_attn` is the limit of its sequences."""
        return replace(self.decode, b_moe=self.decode.b_moe + self.mix_prefill)


# Sequences of an attention sub-batch of decode if the configuration does not say, and groups are cut.
B_ATTN_DECODE = 256


def make_plan(
    config: BatchConfig, *, page_size: int, max_running: int, whole_groups: bool = False, dense: bool = False
) -> Plan:
    """Return the plan for a configuration, fitted to what the engine can hold. Pure.

    Args:
        config: the configuration.
        page_size: tokens of a KV page.
        max_running: the most sequences that the engine can hold.
        whole_groups: whether a decode group is one attention sub-batch, unless the configuration limits it.
        dense: whether the model has no experts. The rows of a sub-batch of prompts are then enough for each weight, so
            that prompts are not accumulated by default; the rows of a decode step are.
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
        partition_below=config.ranks.partition_below,
        partition_least_tokens=config.ranks.partition_least_tokens,
        partition_prompt_tokens=config.ranks.partition_prompt_tokens,
    )


def row_spans(num_rows: int, limit: int) -> list[tuple[int, int]]:
    """Return `num_rows` rows cut into ceil(num_rows / limit) contiguous spans [start, end) of at most `limit` rows."""
    assert limit > 0, f"limit {limit} must be positive"
    return [(start, min(start + limit, num_rows)) for start in range(0, num_rows, limit)]


def num_expert_calls(num_rows: int, phase: PhasePlan) -> int:
    """Return how many expert calls a layer takes for the rows of one rank; at least one."""
    return max(1, len(row_spans(num_rows, phase.expert_rows)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of one sequence in an attention sub-batch: rows [start, end) of the new tokens of sequence `index`."""

    index: int
    start: int
    end: int


def cut_sequences(lengths: list[int], span: tuple[int, int]) -> list[Piece]:
    """Return the pieces of sequences that lie in rows `span` [start, end) of a group.

    `lengths`: new tokens of each sequence; the sequences lie end to end. A sequence that crosses the edge of a span is
    cut there, so that no row is padded.
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
