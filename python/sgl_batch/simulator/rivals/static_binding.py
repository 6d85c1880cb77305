"""Decides as engines do that bind a sequence to a rank: continuous batching, with prompts in chunks.

Sequences are dealt to ranks, or to groups of them, once. A rank knows nothing of the others, and no sequence changes
its rank. Where pages lack, the engine retracts running sequences, which are computed again later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sgl_batch.core.actions import Actions, BeginInterval, Chunk, Idle, Refill, Step
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_boundary import State
from sgl_batch.core.plan import Plan
from sgl_batch.simulator.rank import SimulatedRank
from sgl_batch.simulator.rivals.lazy_pages import cut, extend_or_retract, pages_ahead
from sgl_batch.simulator.rivals.prompt_adder import next_prompts
from sgl_batch.simulator.rivals.token_ratio import TokenRatio

# Passes in which SGLang holds prompts back at most (`--prefill-delayer-max-delay-passes`).
_MOST_HELD_BACK = 30


class PrefillFirst:
    """SGLang's default: prompts are computed as soon as they fit, in passes of their own, before decode goes on.

    A prompt fits if its tokens, all that it may generate, and the expected rest of all running outputs have room
    (`next_prompts`, `TokenRatio`). Once one has not, none is tried until a running sequence ends or is retracted.
    Sequences with the fewest generated tokens are retracted first, and wait behind all others. With data-parallel
    attention some ranks decode while others prefill; all wait for the longest pass.

    Where each step begins an interval, this is the order of events in SGLang's passes: prompts are tried; if none is
    computed, sequences that have ended leave, others are retracted, and the rest decode a step. With longer intervals
    prompts are tried as soon as a sequence has ended.
    """

    is_local = True

    def next(self, state: State, kv: KVState, plan: Plan, *, may_prefill: bool = True) -> Actions:
        """Return the actions of a rank. `may_prefill`: whether it may begin a prompt in this pass."""
        if state.ready:
            return (Refill(sequences=tuple(state.ready)),)
        ratio = _ratio(kv)
        chunks = self._prompts(state, kv, plan) if may_prefill or state.begun else ()
        if chunks:
            ratio.prefills = True
            return (Step(prefill=chunks, decode=()),)
        ratio.prefills = False
        ratio.drop_ended()
        if state.running and state.steps >= plan.boundary_tokens:
            return self._begin_interval(kv, plan, ratio)
        return (Step(),) if state.running else (Idle(),)

    def meet(self, ranks: Sequence[SimulatedRank]) -> bool:
        return False

    def has_prompts(self, state: State, kv: KVState, plan: Plan) -> bool:
        """Return whether a rank would compute prompts now."""
        ratio = _ratio(kv)
        before = ratio.full, ratio.ended
        chunks = self._prompts(state, kv, plan)
        ratio.full, ratio.ended = before
        return bool(chunks)

    @staticmethod
    def _prompts(state: State, kv: KVState, plan: Plan) -> tuple[Chunk, ...]:
        ratio = _ratio(kv)
        ratio.decoded(state.steps)
        if plan.boundary_tokens > 1 or (ratio.full and not state.running):
            ratio.drop_ended()
        chunks = next_prompts(state, kv, plan, ratio)
        if not chunks and not state.running and ratio.ended:
            ratio.drop_ended()
            chunks = next_prompts(state, kv, plan, ratio)
        return chunks

    @staticmethod
    def _begin_interval(kv: KVState, plan: Plan, ratio: TokenRatio) -> Actions:
        kept = sorted(kv.runners(), key=lambda one: (-one.generated_tokens, one.prompt_tokens))
        actions, stay = extend_or_retract(kept, kv.device, plan)
        if len(stay) < len(kept):
            ratio.retracted(stay)
        else:
            ratio.begin_interval()
        return (*actions, BeginInterval(), *([Step()] if plan.boundary_tokens == 1 else []))


def _ratio(kv: KVState) -> TokenRatio:
    ratio = kv.admission.policy
    assert isinstance(ratio, TokenRatio), "SGLang's admission goes by its new-token ratio"
    return ratio


class PrefillTogether:
    """SGLang's with `--enable-prefill-delayer`: ranks hold prompts back until all of them can compute some.

    A pass lasts as long as that of its busiest rank, so that ranks that compute prompts one after the other hold all
    others up each time. After so many passes in which only some ranks could, prompts are computed all the same.
    """

    is_local = True

    def __init__(self, most_passes: int = _MOST_HELD_BACK) -> None:
        self._first, self._most_passes, self._held_back, self._may_prefill = PrefillFirst(), most_passes, 0, True

    def next(self, state: State, kv: KVState, plan: Plan) -> Actions:
        return self._first.next(state, kv, plan, may_prefill=self._may_prefill)

    def meet(self, ranks: Sequence[SimulatedRank]) -> bool:
        can = {self._first.has_prompts(one.state(), one.kv_state(), one.plan) for one in ranks if not one.ready}
        waited = self._held_back >= self._most_passes or not any(one.running for one in ranks)
        self._may_prefill = len(can) < 2 or waited
        self._held_back = 0 if self._may_prefill else self._held_back + 1
        return not self._may_prefill


class DecodeFirst:
    """vLLM's: each pass decodes all running sequences, and computes chunks of prompts up to its budget of tokens.

    A prompt is admitted while pages for it are free. The sequence that has joined last is preempted first, and waits
    before all others. (An engine takes the pages of a prompt chunk by chunk; here it takes them with the first.)
    """

    is_local = True

    def next(self, state: State, kv: KVState, plan: Plan) -> Actions:
        if state.ready:
            return (Refill(sequences=tuple(state.ready)),)
        if state.running and state.steps >= plan.boundary_tokens:
            actions, _ = extend_or_retract(list(kv.runners()), kv.device, plan)
            return (*actions, BeginInterval())
        chunks = _prompts_beside(state, kv, plan)
        return (Step(prefill=chunks),) if chunks or state.running else (Idle(),)

    def meet(self, ranks: Sequence[SimulatedRank]) -> bool:
        return False


def _prompts_beside(state: State, kv: KVState, plan: Plan) -> tuple[Chunk, ...]:
    """Return prompts and parts of prompts of the tokens that a pass has left, of which the last may stay unfinished."""
    tokens, chunks = plan.prefill.b_moe - state.running, list[Chunk]()
    for chunk in _waiting(state, kv, plan):
        part = cut(chunk, tokens, plan.page_size)
        if part.tokens <= 0:
            break
        chunks.append(part)
        tokens -= part.tokens
        if part is not chunk:
            break
    return tuple(chunks)


def _waiting(state: State, kv: KVState, plan: Plan) -> Iterable[Chunk]:
    """Yield the rest of a begun prompt, and the prompts for which pages and rows are free, as they are asked for."""
    if state.rest is not None:
        yield state.rest
    free, rows = kv.device.free_pages, plan.decode.b_moe - state.running - (state.begun is not None)
    for sequence in state.queued:
        pages = pages_ahead(sequence, kv.device, plan)
        if rows <= 0 or pages > free:
            return
        yield Chunk(sequence=sequence, start=0, tokens=sequence.kv_tokens)
        free, rows = free - pages, rows - 1
