"""Owns what the scheduler knows of one sequence. How it may change is decided in `coroutine`."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(enum.Enum):
    """Where a sequence stands: SUSPENDED ones wait with their KV in the store tier, in the middle of their output."""

    QUEUED = "QUEUED"
    PREFILLING = "PREFILLING"
    READY = "READY"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    MIGRATING = "MIGRATING"
    FINISHED = "FINISHED"
    ABORTED = "ABORTED"


@dataclass(slots=True, kw_only=True)
class SequenceState:
    """One request's generation, as an explicit state machine that can be written down.

    Lengths are in tokens. `prompt_group` names the choices of one request (n > 1) that share a prompt;
    `choice` is the index among them and choice 0 is the leader, which computes the prompt for all. `waits_since` orders
    those that wait for pages of the device, READY and SUSPENDED alike. `computed_tokens`: for how many positions KV has
    been computed, as far as its prefills know; decode steps go on from there. The first `shared_tokens` of the prompt
    are those of a prompt before it, which computes them. `lost_tokens`: for how many positions it had KV when it was
    retracted; its next prefill computes them again, those behind its prompt too. `in_one_pass`: its prompt cannot be
    computed chunk by chunk. `ranks`: those that it belongs to; today one, the rank that has it.
    """

    sequence_id: str
    arrival: int
    prompt_tokens: int
    max_new_tokens: int
    prompt_group: str | None = None
    choice: int = 0
    status: Status = Status.QUEUED
    generated_tokens: int = 0
    waits_since: int = 0
    computed_tokens: int = 0
    shared_tokens: int = 0
    lost_tokens: int = 0
    in_one_pass: bool = False
    ranks: frozenset[int] = frozenset((0,))

    @property
    def prefill_rows(self) -> int:
        """Tokens that its prefill computes itself."""
        return self.kv_tokens - self.shared_tokens

    @property
    def kv_tokens(self) -> int:
        """Positions whose KV it has, once its prefill is done: the last token sampled has none yet."""
        return self.prompt_tokens + max(self.generated_tokens, 1) - 1

    @property
    def is_leader(self) -> bool:
        return self.prompt_group is not None and self.choice == 0

    @property
    def total_tokens(self) -> int:
        """The most positions whose KV this sequence can ever hold: the last token sampled needs none."""
        return self.prompt_tokens + max(self.max_new_tokens, 1) - 1
