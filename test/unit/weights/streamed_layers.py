"""Owns layers of random experts, which are both streamed from a checkpoint and resident."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from sgl_batch.core.weight_residency import plan_residency
from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers.moe.clamped_experts import ClampedExperts
from sgl_batch.layers.packed_weights import PackedWeights
from sgl_batch.metrics.counters import Counters
from sgl_batch.weights.expert_checkpoint import ExpertLocations, find_experts
from sgl_batch.weights.expert_slots import ExpertSlots, SlotTensors
from sgl_batch.weights.weight_streamer import WeightStreamer, packed_compute

LAYERS, EXPERTS, TOP_K, HIDDEN, INTER = 5, 12, 3, 64, 32


class StreamedLayers:
    """`LAYERS` layers of `EXPERTS`, with memory for `slots` experts of all layers.

    `clamped`: they have biases and a clamped activation, and are stacked in the checkpoint. `int8`: they are rounded.
    """

    def __init__(self, folder: Path, slots: int, *, seed: int = 0, clamped: bool = False, int8: bool = False) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self._resident = PackedWeights(native_kernels(), int8=int8)
        self._clamped = [self._draw_clamped() if clamped else None for _ in range(LAYERS)]
        self._w13 = [self._random(EXPERTS, 2 * INTER, HIDDEN) for _ in range(LAYERS)]
        self._w2 = [self._random(EXPERTS, HIDDEN, INTER) for _ in range(LAYERS)]
        self.locations = self._saved(folder)
        for w13, w2 in zip(self._w13, self._w2, strict=True):
            assert self._resident.add_experts(w13, w2, clamped=clamped)
        dtype = torch.int8 if int8 else torch.bfloat16
        tensors = SlotTensors(
            w13=torch.empty(slots, 2 * INTER, HIDDEN, dtype=dtype),
            w2=torch.empty(slots, HIDDEN, INTER, dtype=dtype),
            w13_scales=torch.empty(slots, 2 * INTER) if int8 else None,
            w2_scales=torch.empty(slots, HIDDEN) if int8 else None,
        )
        self.slots = ExpertSlots(self.locations, tensors, num_threads=2)
        self.counters = Counters()
        self.residency = plan_residency(slots, layers=LAYERS, experts=EXPERTS)
        self._keys = [torch.empty(1) for _ in range(LAYERS)]
        kernels = native_kernels()
        assert kernels is not None
        self._streamer = WeightStreamer(
            self.slots, self.residency, self._keys, compute=packed_compute(kernels, self.slots), counters=self.counters
        )

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(torch.bfloat16)

    def _draw_clamped(self) -> ClampedExperts:
        biases = (torch.randn(EXPERTS, size, generator=self.generator) for size in (2 * INTER, HIDDEN))
        w13_bias, w2_bias = biases
        return ClampedExperts(w13_bias=w13_bias, w2_bias=w2_bias, alpha=1.7, limit=7.0)

    def _saved(self, folder: Path) -> ExpertLocations:
        modules = [f"model.layers.{layer}.mlp.experts" for layer in range(LAYERS)]
        tensors, stacked = {}, self._clamped[0] is not None
        for module, w13, w2 in zip(modules, self._w13, self._w2, strict=True):
            if stacked:
                tensors[f"{module}.gate_up_proj"] = w13.transpose(1, 2).contiguous()
                tensors[f"{module}.down_proj"] = w2.transpose(1, 2).contiguous()
            for expert in () if stacked else range(EXPERTS):
                tensors[f"{module}.{expert}.gate_proj.weight"] = w13[expert, :INTER].clone()
                tensors[f"{module}.{expert}.up_proj.weight"] = w13[expert, INTER:].clone()
                tensors[f"{module}.{expert}.down_proj.weight"] = w2[expert].clone()
        file = folder / "model.safetensors"
        save_file(tensors, file)
        return find_experts([str(file)], modules, range(EXPERTS), stacked=stacked)

    def routing(self, rows: int, among: Sequence[int] = range(EXPERTS)) -> torch.Tensor:
        """Return random choices [rows, TOP_K] of some experts, a few of them -1."""
        pool = torch.tensor(list(among))
        picks = [pool[torch.randperm(len(pool), generator=self.generator)[:TOP_K]] for _ in range(rows)]
        ids = torch.stack(picks) if picks else torch.empty(0, TOP_K, dtype=torch.int64)
        ids[torch.rand(ids.shape, generator=self.generator) < 0.05] = -1
        return ids

    def visit(self, layer: int, ids_TK: torch.Tensor) -> None:
        """Make an expert call; check that its result equals that of resident weights, and that no slot is lost."""
        x = self._random(len(ids_TK), HIDDEN)
        weights = torch.rand(ids_TK.shape, generator=self.generator)
        clamped = self._clamped[layer]
        found = self._streamer.experts(x, self._keys[layer], torch.empty(0), weights, ids_TK, clamped=clamped)
        expected = self._resident.experts(x, self._w13[layer], self._w2[layer], weights, ids_TK, clamped=clamped)
        assert all(torch.equal(streamed, resident) for streamed, resident in zip(found, expected, strict=True))
        self.check_slots()

    def check_slots(self) -> None:
        held = self.slots.table.slot_of[self.slots.table.slot_of >= 0].tolist()
        assert len(set(held)) == len(held), "no slot holds two experts"
        assert self.slots.table.num_free + len(held) == self.slots.table.num_slots, "and none is lost"
        assert all(slot < self.slots.table.num_slots for slot in held)

    def fit(self, slots: int) -> None:
        """Fit the slots to a pass that leaves memory for so many."""
        size = self.slots.tensors.slot_bytes
        self._streamer.fit(lambda: slots * size - self.slots.num_bytes + 1000, 1000)
        self.check_slots()

    def leave_all(self) -> None:
        """Visit all layers twice without tokens, so that every read has ended and is counted."""
        for layer in range(LAYERS):
            self.slots.wait(layer, self.slots.table.present(layer))
        for layer in (*range(LAYERS), *range(LAYERS)):
            self.visit(layer, torch.empty(0, TOP_K, dtype=torch.int64))

    def count(self, name: str) -> int:
        return self.counters.counts[f"weights_{name}"]


def routed(ids_TK: torch.Tensor) -> set[int]:
    """Return the experts that are routed to."""
    return set(ids_TK.flatten().tolist()) - {-1}
