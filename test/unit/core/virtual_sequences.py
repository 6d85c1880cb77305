"""Owns what virtual ranks work on: requests, what becomes of their sequences, and batches of these."""

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
    """Comes to `rank` at step `at`; in truth each choice generates `output` tokens, or is aborted at step `abort_at`.

    `rooted`: whether something that it carries keeps it on its rank.
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
    """What is true of a sequence beside its state; it goes along to other ranks."""

    left: int
    rooted: bool
    generated: int = 0
    aborted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences of one forward pass, and how many rows they have in it.

    `prompts`: beside decode rows, those of which the pass computes a prompt's last token.
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
    """Compute a chunk, which follows on what is computed of its prompt and ends with a page, unless the prompt does.

    `begun`: the sequence whose prompt is computed in part; returned is that after it. `take`: admits a queued one.
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
    """Tokens of a virtual prompt: a third of all lengths begin alike."""
    return array("q", [sequence.prompt_tokens % 3]) * sequence.prompt_tokens
