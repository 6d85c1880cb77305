"""Decides which prompts SGLang computes in its next pass, and parts of prompts: its PrefillAdder."""

from __future__ import annotations

from sgl_batch.core.actions import Chunk
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_boundary import State
from sgl_batch.core.page_ledger import pages_for
from sgl_batch.core.plan import Plan
from sgl_batch.core.sequence import SequenceState
from sgl_batch.simulator.rivals.lazy_pages import cut, pages_ahead
from sgl_batch.simulator.rivals.token_ratio import TokenRatio, counted_tokens, further_tokens


def next_prompts(state: State, kv: KVState, plan: Plan, ratio: TokenRatio) -> tuple[Chunk, ...]:
    """Return the prompts and parts of prompts of SGLang's next pass (PrefillAdder); none if its batch is full."""
    ledger, budget, page = kv.device, plan.prefill.b_moe, plan.page_size
    if not state.begun and (ratio.full or not state.queued):
        return ()
    begun = state.begun.computed_tokens if state.begun else 0
    room = _free_tokens(kv, begun) - ratio.expected_rest(kv.runners())
    chunks: list[Chunk] = []
    if state.rest is not None:
        limit = min(budget, int(room)) // page * page
        chunks.append(cut(state.rest, limit if limit > 0 else budget, page))
        budget -= pages_for(chunks[0].tokens, page) * page
        room -= _taken(chunks[0], page)
    free = ledger.free_pages
    rows = plan.decode.b_moe - state.running - ratio.ended - (state.begun is not None)
    is_empty = not ledger.reserved_pages
    lacks = ratio.full
    for sequence in state.queued if not lacks and (not chunks or _is_last(chunks[0])) else ():
        pages = pages_ahead(sequence, ledger, plan)
        need = _known_tokens(sequence) + further_tokens(sequence) + page
        lacks = rows <= 0 or pages > free or not (is_empty or need < room)
        chunk = cut(Chunk(sequence=sequence, start=0, tokens=sequence.kv_tokens), budget, page)
        if lacks or chunk.tokens <= 0:
            break
        chunks.append(chunk)
        room, budget = room - _taken(chunk, page), budget - pages_for(chunk.tokens, page) * page
        free, rows, is_empty, lacks = free - pages, rows - 1, False, room <= 0
        if lacks or budget <= 0 or not _is_last(chunk):
            break
    # A batch of prompts that finds none running begins a new running batch, which is not full.
    ratio.full = lacks and state.running + ratio.ended > 0
    return tuple(chunks)


def _free_tokens(kv: KVState, begun: int) -> int:
    """Return the tokens for which pages hold no KV. `begun`: tokens of the prompt that is computed in part."""
    ledger = kv.device
    used = sum(pages_for(one.kv_tokens, ledger.page_size) for one in kv.runners())
    return (ledger.total_pages - used - pages_for(begun, ledger.page_size)) * ledger.page_size


def _is_last(chunk: Chunk) -> bool:
    return chunk.start + chunk.tokens >= chunk.sequence.kv_tokens


def _known_tokens(sequence: SequenceState) -> int:
    """Return the tokens of a queued sequence's prompt, and of what it had generated when it was retracted."""
    return sequence.prompt_tokens + sequence.generated_tokens


def _taken(chunk: Chunk, page: int) -> int:
    """Return the room that a chunk takes: with the last one of a prompt all that the sequence may generate."""
    further = counted_tokens(chunk.sequence.max_new_tokens) if _is_last(chunk) else 0
    return pages_for(chunk.tokens, page) * page + further + page
