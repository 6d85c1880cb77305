"""Counts what a candidate plan takes of the device in each phase, by the arithmetic of `sgl-batch check`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sgl_batch.config import BatchConfig, from_mapping
from sgl_batch.core.device_budget import ModelShape, pass_bytes
from sgl_batch.core.model_numbers import head_dims, number, shape_of
from sgl_batch.planner.candidate import DEVICE, Candidate
from sgl_batch.planner.needs import Fit, Model, Target, fit
from sgl_batch.planner.schedule import Room
from sgl_batch.planner.search import MemoryMap


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateMemory:
    """Counts the memory of candidates for one model and target. `base`: the settings that no candidate changes."""

    model: Model
    target: Target
    base: BatchConfig

    def __call__(self, candidate: Candidate) -> MemoryMap:
        """Return the candidate's memory map. Equal ones differ in nothing but b_attn_decode and accumulate."""
        config = self._config(candidate)
        found = fit(self.model, config, self.target)
        page_bytes = self.target.page_size * self.model.kv_token_bytes // self.target.kv_parts
        store = config.memory.kv_store_bytes // self.target.ranks
        room = Room(
            device=(found.pages or 0) // page_bytes,
            store=store // page_bytes if candidate.kv != DEVICE else 0,
        )
        return MemoryMap(phases=self._phases(candidate, found), room=room, lacks=found.lacks)

    def _config(self, candidate: Candidate) -> BatchConfig:
        store = {"kv_store_bytes": 0} if candidate.kv == DEVICE else {}
        return from_mapping({**self.base.flat(), "kv_store_mode": "auto", **candidate.settings, **store})

    def _phases(self, candidate: Candidate, found: Fit) -> dict[str, dict[str, int]]:
        """Return bytes by use in both phases, which differ in the working memory of a pass."""
        rows = candidate.b_moe_decode
        ranks = self.target.ranks
        working = pass_bytes(self._shape, rows=rows, sequences=rows, b_attn=candidate.b_attn_decode, num_ranks=ranks)
        decode = {**found.uses, "working memory": min(working, found.uses["working memory"])}
        return {"prefill": found.uses, "decode": decode}

    @property
    def _shape(self) -> ModelShape:
        value = self.model.value
        return shape_of(
            value,
            hidden=number(value, "hidden_size", "n_embd"),
            vocabulary=number(value, "vocab_size"),
            layers=number(value, "num_hidden_layers", "n_layer"),
            head_dim=max(head_dims(value)),
            item_bytes=self.model.item_bytes,
        )


def remembered(memory: CandidateMemory) -> Callable[[Candidate], MemoryMap]:
    """Return `memory` with its answers kept, by what an answer depends on."""
    known: dict[Candidate, MemoryMap] = {}

    def memory_of(candidate: Candidate) -> MemoryMap:
        key = replace(candidate, accumulate=None, interleaved=False)
        if key not in known:
            known[key] = memory(key)
        return known[key]

    return memory_of
