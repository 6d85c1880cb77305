"""Owns the data of virtual ranks: requests, the fates of their sequences, and batches of sequences."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from sgl_batch.core.actions import Chunk
from sgl_batch.core.admission import Admission
from sgl_batch.core.coroutine import Event
from sgl_batch.core.plan import Plan, num_expert_calls
from sgl_batch.core.primitives import combine
from sgl_batch.core.sequence import SequenceState


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request that arrives at `rank` at step `at`.

    Each choice will generate `output` tokens, or is aborted at step `abort_at`. `rooted`: whether it must stay on its
    rank.
    """

    at: int
    rank: int
    prompt: int
    max_new: int
    output: int
    choices: int = 1
    rooted: bool = False
    abort_at: int | None = None


@dataclass(slots=True, kw_only=True)
class Fate:
    """The future of a sequence, which decisions do not see. It moves to other ranks with the sequence."""

    left: int
    rooted: bool
    generated: int = 0
    aborted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The sequences of one forward pass, and its number of rows.

    `prompts`: in a decode step, the sequences whose last prompt token the pass computes.
    """

    decode: bool
    sequences: tuple[SequenceState, ...]
    rows: int
    prompts: tuple[SequenceState, ...] = ()

    def expert_calls(self, plan: Plan) -> int:
        if not self.decode:
            return num_expert_calls(self.rows, plan.prefill)
        most = plan.decode.expert_rows + plan.mix_prefill
        return max(1, -(-self.rows // most))


@dataclass(slots=True, kw_only=True)
class Running:
    """The decode batch."""

    reqs: list[SequenceState] = field(default_factory=list)

    def is_empty(self) -> bool:
        return not self.reqs


def computed_with(
    chunk: Chunk, begun: SequenceState | None, plan: Plan, take: Callable[[Admission], None]
) -> SequenceState | None:
    """Compute a chunk, and check that it continues its prompt and ends at a page or with the prompt.

    `begun`: the sequence whose prompt is computed in part; that after the chunk is returned. `take`: admits a queued
    sequence.
    """
    sequence, end = chunk.sequence, chunk.start + chunk.tokens
    if sequence is begun:
        assert chunk.start == sequence.computed_tokens
    else:
        assert begun is None, "one prompt at a time is computed in part"
        assert chunk.start == sequence.shared_tokens
        take(Admission(leader=sequence))
        combine([sequence], Event.COMBINE_PREFILL, "")
    assert chunk.tokens > 0
    assert end == sequence.prompt_tokens or end % plan.page_size == 0
    sequence.computed_tokens = end
    return None if end == sequence.prompt_tokens else sequence


def prompt_of(sequence: SequenceState) -> array[int]:
    """Return the tokens of a virtual prompt; prompts of a third of all lengths share their beginning."""
    return array("q", [sequence.prompt_tokens % 3]) * sequence.prompt_tokens
