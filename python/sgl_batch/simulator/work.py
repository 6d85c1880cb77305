"""Owns what a simulation asks of a cost model: the work of a forward pass, and the interface of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from sgl_batch.planner.pass_cost import PassTime

# The part of the seconds of a change into sets of ranks (core/tail_cost).
PARTITION = "partition"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassWork:
    """A forward pass of ranks in lockstep: the work of its busiest rank, which all wait for, and the rows of all ranks.

    Attributes:
        prompts: Prompts, or chunks of prompts, that the rank computes.
        prompt_tokens: Tokens of these prompts.
        prompt_pairs: Pairs of one of these tokens and a token that it looks at, summed over the prompts.
        rows: Sequences that the rank decodes.
        kv_tokens: Tokens of KV that these look at, together.
        all_rows: Prompt tokens and decoded sequences of all ranks together, which the experts share.
        streams: Whether the decoded sequences read their KV from the store.
    """

    prompts: int = 0
    prompt_tokens: int = 0
    prompt_pairs: int = 0
    rows: int = 0
    kv_tokens: int = 0
    all_rows: int = 0
    streams: bool = False

    @property
    def mixed(self) -> bool:
        """Return whether prompts and decoded sequences share the pass."""
        return bool(self.prompt_tokens and self.rows)


class Costs(Protocol):
    """Seconds of what an instance does: `cost(model, hardware, engine, work) -> parts`, for one of the first three.

    Attributes:
        sources: By part, where its seconds come from: a profile, a table of measured kernels, a data sheet, assumed.
    """

    sources: Mapping[str, str]

    def of_pass(self, work: PassWork) -> PassTime:
        """Return the time of a forward pass of all ranks, with what surrounds its layers."""

    def of_copy(self, tokens: float) -> PassTime:
        """Return the time of copying the KV of so many tokens, of all layers, between a rank's device and the store."""

    def of_move(self, tokens: float) -> PassTime:
        """Return the time of moving the KV of so many tokens, of all layers, from one rank to another."""

    def of_boundary(self) -> PassTime:
        """Return the time in which all ranks agree on what follows a boundary, beside the work that they then begin."""


def pairs_of(length: int, start: int = 0) -> int:
    """Return the pairs of tokens [start, length) of a prompt with the tokens that each looks at."""
    return length * (length + 1) // 2 - start * (start + 1) // 2
