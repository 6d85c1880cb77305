"""Decides what the next forward pass between boundaries computes: decode rows, and with them chunks of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from sgl_batch.core.actions import Chunk, Step
from sgl_batch.core.admission import Admission, group_by_prompt, select_prefill_group
from sgl_batch.core.exclusive import assign_tier
from sgl_batch.core.kv_policy import KVPolicy
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_boundary import State
from sgl_batch.core.plan import Plan

_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """The input of a step policy. `in_flight`: steps that were submitted and have no results yet."""

    state: State
    kv: KVState
    plan: Plan
    in_flight: int = 0

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that are not yet computed."""
        rest = self.state.rest
        return self.state.queued_tokens + (0 if rest is None else rest.tokens)

    @property
    def free_rate(self) -> float:
        """The free share of all KV pages that sequences can have."""
        ledger = self.kv.admission
        return ledger.free_pages / max(1, ledger.total_pages + ledger.overflow_pages)

    @property
    def running(self) -> int:
        """The number of sequences that decode."""
        return self.state.running


class StepPolicy(Protocol):
    """Composes each step between boundaries. It may read the head of the queue, never all of it."""

    name: str

    def compose(self, view: StepView, policy: KVPolicy) -> Step:
        """Return the next step. `policy` decides where the KV of prompts is to lie."""


class DecodeOnly:
    """All running sequences decode; prompts are computed in groups of their own."""

    name = "decode only"

    def compose(self, view: StepView, policy: KVPolicy) -> Step:
        return Step()


class MixPrefill:
    """All running sequences decode, and the step also computes up to `plan.mix_prefill` tokens of queued prompts.

    Prompts are taken in the order of the queue. If the step has no room for all of a prompt, the prompt is cut at the
    edge of a page, and the next step continues it. Prompts with several choices, and prompts that are too long and
    cannot be cut, wait for a prefill group. With an exclusive store no prompt is cut: while a sequence had only some of
    its pages, neither tier could count on room in the other.
    """

    name = "mix prefill"

    def compose(self, view: StepView, policy: KVPolicy) -> Step:
        state, plan = view.state, view.plan
        rest, room = state.rest, plan.mix_prefill
        chunks: list[Chunk] = []
        if rest is not None:
            if not (state.free_request_slots or view.kv.device.holds(rest.sequence.sequence_id)):
                return Step()
            chunks.append(_head(rest, room, plan))
            if chunks[0].tokens < rest.tokens:
                return Step(prefill=tuple(chunks))
            room -= rest.tokens
        begun = self._new(view, policy, room) if room >= plan.page_size else []
        if not begun:
            return Step(prefill=tuple(chunks))
        for unit in begun:
            start = unit.leader.shared_tokens
            whole = Chunk(sequence=unit.leader, start=start, tokens=unit.leader.prefill_rows)
            chunks.append(_head(whole, room, plan))
            room -= chunks[-1].tokens
        pages = policy.prefill(tuple(begun), state, view.kv, plan).on_device
        return Step(prefill=tuple(chunks), on_device=pages)

    def _new(self, view: StepView, policy: KVPolicy, room: int) -> list[Admission]:
        """Return the units whose first chunk the step computes; only the last of them may be cut."""
        state, kv, plan = view.state, view.kv, view.plan
        capacity = policy.capacity(state, kv, plan)
        heads = list(_heads(state, room))
        kv.estimate_shared(unit.leader for unit in heads)
        units = heads if capacity is None else list(assign_tier(heads, capacity, kv.admission, plan))
        chosen = select_prefill_group(
            units, kv.admission, b_moe=_NO_LIMIT, free_request_slots=state.free_request_slots, plan=plan
        )
        taken = []
        for unit in chosen:
            rows = unit.leader.prefill_rows
            whole = capacity is not None or unit.leader.in_one_pass or unit.leader.generated_tokens > 0
            if room < (rows if whole else min(rows, plan.page_size)):
                break
            taken.append(unit)
            room -= rows
        return taken


def _heads(state: State, room: int) -> Iterator[Admission]:
    """Yield the first units of the queue, each a sequence alone, until their prompts have `room` tokens."""
    for unit in group_by_prompt(state.queued, most_members=state.request_slots):
        if unit.followers or room <= 0:
            return
        yield unit
        room -= unit.leader.kv_tokens


def _head(chunk: Chunk, room: int, plan: Plan) -> Chunk:
    """Return as much of a chunk as there is room for. It ends at the edge of a page or with the prompt."""
    if chunk.tokens <= room:
        return chunk
    return Chunk(sequence=chunk.sequence, start=chunk.start, tokens=room // plan.page_size * plan.page_size)


def step_policy(plan: Plan) -> StepPolicy:
    """Return the step policy that the plan asks for."""
    return MixPrefill() if plan.mix_prefill else DecodeOnly()
