"""Counts what a candidate plan takes of the device in each phase, by the arithmetic of `sgl-batch check`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from sgl_batch.config import BatchConfig, from_mapping
from sgl_batch.core.device_budget import ModelShape, pass_bytes
from sgl_batch.core.model_numbers import NUM_EXPERTS, head_dims, number, shape_of
from sgl_batch.core.supported_models import CPU
from sgl_batch.planner.candidate import DEVICE, RESIDENT, Candidate
from sgl_batch.planner.expert_room import ExpertRoom, page_stride
from sgl_batch.planner.followed_run import Room
from sgl_batch.planner.needs import Fit, Model, Target, fit, rank_weights
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
        store = config.memory.kv_store_bytes // self.target.ranks
        phases, pages = self._phases(candidate, found), (found.pages or 0) // self._page_bytes
        room = Room(
            device=pages,
            store=store // self._page_bytes if candidate.kv != DEVICE else 0,
            experts=None if candidate.weights == RESIDENT else self._experts(config, phases, pages),
        )
        return MemoryMap(phases=phases, room=room, lacks=found.lacks)

    @property
    def _page_bytes(self) -> int:
        return self.target.page_size * self.model.kv_token_bytes // self.target.kv_parts

    def _experts(self, config: BatchConfig, phases: Mapping[str, Mapping[str, int]], pages: int) -> ExpertRoom:
        """Return the memory of streamed experts: of a given size, or on a CPU what else is not written yet.

        With a host store, an engine takes all pages of the device as written: copies write them between passes.
        """
        memory, target = config.memory, self.target
        others, least = rank_weights(self.model, config, target)
        is_int8 = target.device == CPU and config.forward.cpu_weight_dtype == "int8"
        layers = max(self.model.expert_layers, 1)
        experts = -(-number(self.model.value, *NUM_EXPERTS, default=1) // target.ranks)
        of_experts = -(-self.model.weight_bytes(int8=is_int8).streamable // target.ranks)
        sizes = {"slot_bytes": max(of_experts // (layers * experts), 1), "layers": layers, "experts": experts}
        if memory.weight_memory or target.device != CPU:
            return ExpertRoom(prefill=least, decode=least, page_bytes=0, stride=1, **sizes)
        left = (target.most or target.budget) - others
        stride = page_stride(self._page_bytes, self._shape.layers)
        if memory.kv_store_bytes:
            left += memory.store_in_memory_bytes // target.ranks - pages * self._page_bytes
            stride = 1
        taken = {phase: sum(uses.values()) - uses["weights"] for phase, uses in phases.items()}
        return ExpertRoom(
            prefill=left - taken["prefill"],
            decode=left - taken["decode"],
            page_bytes=0 if memory.kv_store_bytes and not memory.store_in_memory_bytes else self._page_bytes,
            stride=stride,
            **sizes,
        )

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
