"""Owns what the scheduler knows of one sequence. `coroutine` says how its status may change."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(enum.Enum):
    """The status of a sequence. A SUSPENDED one waits with its KV in the store, in the middle of its output.

    A REPLICA is a copy of a sequence that runs partitioned: it decodes here, and another rank owns the sequence.
    """

    QUEUED = "QUEUED"
    PREFILLING = "PREFILLING"
    READY = "READY"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    MIGRATING = "MIGRATING"
    REPLICA = "REPLICA"
    FINISHED = "FINISHED"
    ABORTED = "ABORTED"


@dataclass(slots=True, kw_only=True)
class SequenceState:
    """One request's generation, as an explicit state machine that can be written down. Lengths are in tokens.

    arrival: number of its arrival at the rank.
    max_new_tokens: the most tokens that it may generate.
    prompt_group: name of the choices of one request (n > 1), which share a prompt; None for a sequence alone.
    choice: index among these choices. Choice 0 is the leader, which computes the prompt for all.
    generated_tokens: tokens generated so far.
    waits_since: orders the sequences that wait for pages of the device, READY and SUSPENDED alike.
    computed_tokens: positions whose KV its prefills have computed; decode steps go on from there.
    shared_tokens: the first tokens of its prompt, which an earlier prompt computes.
    lost_tokens: positions that had KV when it was retracted. Its next prefill computes them again, including those
        after the prompt.
    in_one_pass: whether its prompt cannot be computed chunk by chunk.
    expected_tokens: for how many output tokens it is to reserve pages, as its admission policy has noted last.
    ranks: the ranks that it belongs to: one, or several while it is partitioned, of which one owns it.
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
    expected_tokens: int = 0
    ranks: frozenset[int] = frozenset((0,))

    @property
    def prefill_rows(self) -> int:
        """Tokens that its own prefill computes."""
        return self.kv_tokens - self.shared_tokens

    @property
    def kv_tokens(self) -> int:
        """Positions whose KV it has when its prefill is done; the last sampled token has none yet."""
        return self.prompt_tokens + max(self.generated_tokens, 1) - 1

    @property
    def is_leader(self) -> bool:
        """Whether it computes the prompt for the other choices of its request."""
        return self.prompt_group is not None and self.choice == 0

    @property
    def total_tokens(self) -> int:
        """The most positions whose KV it can ever hold; the last sampled token needs none."""
        return self.prompt_tokens + max(self.max_new_tokens, 1) - 1
