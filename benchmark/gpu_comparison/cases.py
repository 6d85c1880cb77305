"""Owns the parts of a regime: its engines' configurations, its workload, and its goals."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comparison.workload import Workload

from gpu_comparison.goals import Goal
from gpu_comparison.shapes import ModelShape

_DEFAULT_PREFILL = 8192  # tokens of a prefill group or chunk where a case says none, in both engines


class Role(enum.Enum):
    """A case's role in the comparison. The fastest peer counts; a reference is shown and not compared."""

    OURS = "ours"
    PEER = "peer"
    REFERENCE = "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An engine of runners/sglang_engines.py and its constructor's arguments.

    `lacking`: why it cannot be had on this machine; such a case is reported and not run.
    """

    name: str
    role: Role
    engine: str
    arguments: dict[str, Any]
    lacking: str | None = None

    @property
    def group_tokens(self) -> int:
        """Return how many prompt tokens go through the model together."""
        asked: int = self.arguments.get("b_moe_prefill") or self.arguments.get("chunked_prefill_size") or 0
        return asked if asked > 0 else _DEFAULT_PREFILL

    def expert_rows(self, rows: float) -> float:
        """Return how many of a decode step's `rows` one expert call has: all, or b_attn without accumulation."""
        if self.arguments.get("accumulate", True):
            return rows
        return min(rows, float(self.arguments.get("b_attn_decode", 256)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """One comparison. The first of ours that runs is the one compared, so that nothing of ours is picked afterwards.

    `goals`: none where it is a finding and not a demand. `checkpoint`: whether the model needs weights in files; else a
    config.json is all.
    """

    name: str
    title: str
    shape: ModelShape
    workload: Workload
    cases: tuple[Case, ...]
    goals: tuple[Goal, ...] = ()
    checkpoint: bool = False
    notes: tuple[str, ...] = ()

    def of_role(self, role: Role) -> tuple[Case, ...]:
        return tuple(case for case in self.cases if case.role is role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of every visit of a run.

    `until_s`: seconds after the start at which the run has to be over, `limit_s`: the most that one visit may take,
    its start included. `profile_steps`: forward passes in the trace, 0 for none. `routing`: the engine and arguments
    that say which experts the tokens of the others chose. `environment`: of the children.
    """

    model: Path
    out: Path
    rounds: int
    until_s: float
    limit_s: float
    device: str
    routing: Case
    profile_steps: int = 0
    environment: dict[str, str] = field(default_factory=dict)
