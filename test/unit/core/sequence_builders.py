"""Owns builders of sequences and plans for the tests of decisions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sgl_batch.core.plan import PhasePlan, Plan
from sgl_batch.core.sequence import SequenceState, Status


def sequence(
    arrival: int = 0,
    *,
    prompt: int = 10,
    new: int = 5,
    group: str | None = None,
    choice: int = 0,
    status: Status = Status.QUEUED,
) -> SequenceState:
    """Return a sequence named after its arrival."""
    return SequenceState(
        sequence_id=f"s{arrival}",
        arrival=arrival,
        prompt_tokens=prompt,
        max_new_tokens=new,
        prompt_group=group,
        choice=choice,
        status=status,
    )


def choices(count: int, *, first: int = 0, group: str = "g", prompt: int = 10, new: int = 5) -> list[SequenceState]:
    """Return the choices of one request, which arrive together; the first is the leader."""
    return [sequence(first + index, prompt=prompt, new=new, group=group, choice=index) for index in range(count)]


def plan(
    *,
    b_moe_prefill: int = 100,
    b_moe: int = 8,
    boundary_tokens: int = 4,
    refill_watermark: float = 0.75,
    ready_target: int = 12,
    page_size: int = 8,
    mix_prefill: int = 0,
) -> Plan:
    """Return a plan whose attention sub-batches, which no decision reads, are as large as its groups."""
    return Plan(
        prefill=PhasePlan(b_attn=b_moe_prefill, b_moe=b_moe_prefill),
        decode=PhasePlan(b_attn=b_moe, b_moe=b_moe),
        page_size=page_size,
        boundary_tokens=boundary_tokens,
        refill_watermark=refill_watermark,
        ready_target=ready_target,
        mix_prefill=mix_prefill,
    )


def in_force(fixed: Plan) -> Any:
    """Return a stand-in for a `PlanInForce` of which only the plan is read."""
    return SimpleNamespace(plan=fixed, most_prompt_tokens=None)
