"""Decides as engines do that bind a sequence to a rank: continuous batching, with prompts in chunks.

Sequences are dealt to ranks, or to groups of them, once. A rank knows nothing of the others, and no sequence changes
its rank. Where pages lack, the engine retracts running sequences, which are computed again later.
"""

from __future__ import annotations

from sgl_batch.core.actions import Actions, BeginInterval, Idle, Refill, Step
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_boundary import State
from sgl_batch.core.plan import Plan
from sgl_batch.core.sequence import SequenceState
from sgl_batch.simulator.rivals.lazy_pages import TokenRatio, chunks_of, extend_or_retract, further_tokens


class PrefillFirst:
    """SGLang's default: prompts are computed as soon as they fit, in passes of their own, before decode goes on.

    A prompt fits if its tokens, all that it may generate, and the expected rest of all running outputs have room
    (PrefillAdder, `TokenRatio`). Sequences with the fewest generated tokens are retracted first. With data-parallel
    attention some ranks decode while others prefill; all wait for the longest pass.
    """

    is_local = True

    def next(self, state: State, kv: KVState, plan: Plan) -> Actions:
        if state.ready:
            return (Refill(sequences=tuple(state.ready)),)
        ratio = kv.admission.policy
        assert isinstance(ratio, TokenRatio), "SGLang's admission goes by its new-token ratio"
        if state.running and state.steps >= plan.boundary_tokens:
            return self._begin_interval(state, kv, plan, ratio)
        if state.queued or state.begun:
            room = kv.device.free_pages * plan.page_size
            room -= sum(ratio.expected_tokens(one) for one in kv.runners()) if state.queued else 0
            chunks = chunks_of(state, kv, plan, plan.prefill.b_moe, room=room, costs=_whole_need)
            if chunks:
                return (Step(prefill=chunks, decode=()),)
        return (Step(),) if state.running else (Idle(),)

    @staticmethod
    def _begin_interval(state: State, kv: KVState, plan: Plan, ratio: TokenRatio) -> Actions:
        kept = sorted(kv.runners(), key=lambda one: (-one.generated_tokens, one.prompt_tokens))
        actions, stay = extend_or_retract(kept, kv.device, plan)
        if len(stay) < len(kept):
            ratio.retracted(stay)
        else:
            ratio.passed(state.steps)
        return (*actions, BeginInterval())


class DecodeFirst:
    """vLLM's: each pass decodes all running sequences, and computes chunks of prompts up to its budget of tokens.

    A prompt is admitted while pages for it are free. The sequence that has joined last is preempted first. (An engine
    takes the pages of a prompt chunk by chunk; here it takes them with the first.)
    """

    is_local = True

    def next(self, state: State, kv: KVState, plan: Plan) -> Actions:
        if state.ready:
            return (Refill(sequences=tuple(state.ready)),)
        if state.running and state.steps >= plan.boundary_tokens:
            actions, _ = extend_or_retract(list(kv.runners()), kv.device, plan)
            return (*actions, BeginInterval())
        budget = plan.prefill.b_moe - state.running
        chunks = chunks_of(state, kv, plan, budget, room=0.0, costs=lambda _: 0.0)
        return (Step(prefill=chunks),) if chunks or state.running else (Idle(),)


def _whole_need(sequence: SequenceState) -> float:
    return sequence.kv_tokens + further_tokens(sequence)
