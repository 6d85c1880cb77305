"""Owns a candidate plan, as flags of `sgl-batch run`, and which mechanisms the engine has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgl_batch.config import BatchConfig, from_mapping
from sgl_batch.core.plan import Plan, make_plan

DEVICE, INCLUSIVE, EXCLUSIVE, STREAMED = "device", "inclusive", "exclusive", "streamed"
RESIDENT = "resident"
NOT_IMPLEMENTED = "modelled, not implemented"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A choice of everything that the planner chooses.

    Attributes:
        b_attn_prefill, b_moe_prefill: Tokens of a sub-batch and of a group.
        b_attn_decode, b_moe_decode: Sequences of a sub-batch and of a group.
        accumulate: Whether sub-batches share an expert call; None as the engine does by default.
        kv: Where KV lies: "device", or with a host store "inclusive", "exclusive" or "streamed".
        weights: "resident" or "streamed".
        interleaved: Two decode groups by turns, so that one's copies run during the other's computation.
        boundary_tokens, ready_ahead: The interval, and the share of sequences prefilled ahead; None as configured.
    """

    b_attn_prefill: int
    b_moe_prefill: int
    b_attn_decode: int
    b_moe_decode: int
    accumulate: bool | None = None
    kv: str = DEVICE
    weights: str = RESIDENT
    interleaved: bool = False
    boundary_tokens: int | None = None
    ready_ahead: float | None = None

    @property
    def is_implemented(self) -> bool:
        """Return whether the engine can run it."""
        return not self.interleaved

    @property
    def settings(self) -> Mapping[str, Any]:
        """Return it as values of `BatchConfig`, by their names there."""
        store = {} if self.kv == DEVICE else {"decode_kv": STREAMED if self.kv == STREAMED else RESIDENT}
        mode = {"kv_store_mode": self.kv} if self.kv in (INCLUSIVE, EXCLUSIVE) else {}
        return {
            "b_attn_prefill": self.b_attn_prefill,
            "b_moe_prefill": self.b_moe_prefill,
            "b_attn_decode": self.b_attn_decode,
            "b_moe_decode": self.b_moe_decode,
            **({} if self.accumulate is None else {"accumulate": self.accumulate}),
            **store,
            **mode,
            **({} if self.weights == RESIDENT else {"weights": self.weights}),
            **({} if self.boundary_tokens is None else {"boundary_tokens": self.boundary_tokens}),
            **({} if self.ready_ahead is None else {"ready_ahead": self.ready_ahead}),
        }


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """Return values of `BatchConfig` as flags of `sgl-batch run`."""
    flags: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        flags += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags


def plan_of(candidate: Candidate, base: BatchConfig, *, page_size: int, dense: bool) -> Plan:
    """Return the plan that an engine makes of a candidate.

    `base`: all other settings; `dense`: whether the model has no experts.
    """
    settings = {name: value for name, value in candidate.settings.items() if name not in ("decode_kv", "weights")}
    config = from_mapping({**base.flat(), **settings})
    return make_plan(config, page_size=page_size, max_running=most_running(candidate), dense=dense)


def most_running(candidate: Candidate) -> int:
    """Return how many sequences an engine holds by default: those of two decode groups."""
    return 2 * candidate.b_moe_decode
