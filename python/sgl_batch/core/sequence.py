"""Owns what the scheduler knows of one sequence. How it may change is decided in `coroutine`."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(enum.Enum):
    """Where a sequence stands (DESIGN names; SUSPENDED appears with the tier that needs it)."""

    QUEUED = "QUEUED"
    PREFILLING = "PREFILLING"
    READY = "READY"
    RUNNING = "RUNNING"
    MIGRATING = "MIGRATING"
    FINISHED = "FINISHED"
    ABORTED = "ABORTED"


@dataclass(slots=True, kw_only=True)
class Sequence:
    """One request's generation, as an explicit state machine that can be written down.

    Lengths are in tokens. `prompt_group` names the choices of one request (n > 1) that share a prompt;
    `choice` is the index among them and choice 0 is the leader, which computes the prompt for all.
    """

    sequence_id: str
    arrival: int
    prompt_tokens: int
    max_new_tokens: int
    prompt_group: str | None = None
    choice: int = 0
    status: Status = Status.QUEUED
    generated_tokens: int = 0

    @property
    def is_leader(self) -> bool:
        return self.prompt_group is not None and self.choice == 0

    @property
    def total_tokens(self) -> int:
        """The most positions whose KV this sequence can ever hold: the last token sampled needs none."""
        return self.prompt_tokens + max(self.max_new_tokens, 1) - 1
