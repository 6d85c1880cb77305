"""Owns experts whose weights are read while the model runs: the next layer's experts are read while this one computes.

Which experts stay, which are read ahead, and how much memory they take is decided in core/weight_residency.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Generic, Protocol, TypeVar

import torch

from sgl_batch.core.weight_residency import (
    WeightResidency,
    plan_residency,
    read_ahead_pays,
    slots_that_fit,
    slots_to_stream,
    to_keep,
)
from sgl_batch.layers.moe.clamped_experts import ClampedExperts
from sgl_batch.layers.moe.expert_runner import ExpertRunner
from sgl_batch.layers.moe.packed_experts import packed_experts
from sgl_batch.metrics.counters import Counters
from sgl_batch.sglang_adapter.host_copies import upload_copy
from sgl_batch.weights.expert_slot_table import ExpertSlotTable
from sgl_batch.weights.expert_slots import ExpertSlots, LoadTotals, SlotTensors

_POPULARITY_DECAY = 0.9  # from one visit of a layer to its next


class Slots(Protocol):
    """Expert slots, with the contracts of ExpertSlots: that class on a CPU, DeviceExpertSlots on a GPU."""

    tensors: SlotTensors
    table: ExpertSlotTable

    def ask(self, layer: int, experts: Sequence[int], *, urgent: bool) -> None: ...
    def hurry(self, layer: int, experts: Sequence[int]) -> None: ...
    def drop(self, layer: int, experts: Iterable[int]) -> list[int]: ...
    def wait(self, layer: int, experts: Sequence[int]) -> None: ...
    def free(self, layer: int, experts: Sequence[int]) -> None: ...
    def totals(self) -> LoadTotals: ...


class ResizableSlots(Slots, Protocol):
    """Slots that take memory as they are used, and give it back, as ExpertSlots does."""

    @property
    def num_bytes(self) -> int: ...
    def resize(self, num_slots: int) -> list[tuple[int, int, bool]]: ...


S_co = TypeVar("S_co", bound=Slots, covariant=True)


class Compute(Protocol):
    """An `ExpertRunner` whose matrices are those of a layer's expert slots: it gets the layer's number for them."""

    def __call__(
        self,
        layer: int,
        x_TM: torch.Tensor,
        weights_TK: torch.Tensor,
        ids_TK: torch.Tensor,
        *,
        f32_output: bool,
        clamped: ClampedExperts | None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def packed_compute(kernels: ModuleType, slots: ExpertSlots) -> Compute:
    """Return a Compute of the native kernels, over slots of packed weights."""

    def compute(
        layer: int,
        x_TM: torch.Tensor,
        weights_TK: torch.Tensor,
        ids_TK: torch.Tensor,
        *,
        f32_output: bool,
        clamped: ClampedExperts | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = slots.tensors
        return packed_experts(
            kernels,
            x_TM,
            tensors.w13,
            tensors.w2,
            weights_TK,
            ids_TK,
            f32_output=f32_output,
            w13_scales=tensors.w13_scales,
            w2_scales=tensors.w2_scales,
            slots=slots.table.slot_of[layer],
            clamped=clamped,
        )

    return compute


def plain_compute(runner: ExpertRunner, slots: Slots) -> Compute:
    """Return a Compute of a runner for plain weights, to which the slots look like the experts of one layer."""

    def compute(
        layer: int,
        x_TM: torch.Tensor,
        weights_TK: torch.Tensor,
        ids_TK: torch.Tensor,
        *,
        f32_output: bool,
        clamped: ClampedExperts | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slot_of_E = upload_copy(slots.table.slot_of[layer], ids_TK.device).to(ids_TK.dtype)
        chosen_TK = torch.where(ids_TK < 0, ids_TK, slot_of_E[ids_TK.clamp(min=0)])
        tensors = slots.tensors
        if clamped is not None:
            expert_of_S = upload_copy(slots.table.expert_of(layer), ids_TK.device)
            clamped = clamped.of_experts(expert_of_S)
        given = x_TM, tensors.w13, tensors.w2, weights_TK, chosen_TK
        out_TM, rows_S = runner(*given, f32_output=f32_output, clamped=clamped)
        rows_E = torch.where(slot_of_E < 0, 0, rows_S[slot_of_E.clamp(min=0)])
        return out_TM, rows_E

    return compute


@dataclass(slots=True)
class _Layer:
    """One layer's experts.

    `popularity`: decayed count of each expert's visits. `kept`: experts that stay in their slots between two visits.
    `fresh`: experts read since the layer was left. `routed`: experts that tokens were routed to since it was entered.
    """

    number: int
    popularity: list[float]
    kept: set[int] = field(default_factory=set)
    fresh: set[int] = field(default_factory=set)
    routed: set[int] = field(default_factory=set)


class WeightStreamer(Generic[S_co]):
    """Reads the experts of a model's layers as the layers come round, and computes them. One thread calls it.

    It counts experts: `weights_routed`, to which a visit of a layer routed tokens; of these, `weights_kept` were in
    their slots, and the others were read; `weights_unrouted` were read ahead and not routed to. `weights_slots` is how
    many slots there is memory for; `weights_resizes` says how often that changed, and `weights_resize_us` what it took.
    """

    def __init__(
        self,
        slots: S_co,
        residency: WeightResidency,
        keys: list[torch.Tensor],
        *,
        compute: Compute,
        counters: Counters,
        reads_routing: bool = True,
    ) -> None:
        """Stream through `slots`, all of which are free.

        Args:
            slots: the expert slots.
            residency: how many slots there are, and how many experts of each layer stay.
            keys: for each layer, in order, the parameter that stands for its gate and up weights. An expert call names
                its layer by it.
            compute: computes a layer from the slots.
            counters: where experts and waits are counted.
            reads_routing: whether the host reads which experts the router has chosen. On a GPU it would wait for that:
                without it, a group that is likely to use nearly all experts of a layer counts as using all.
        """
        experts = slots.table.slot_of.shape[1]
        self._slots, self._residency, self._compute, self._counters = slots, residency, compute, counters
        self._reads_routing = reads_routing
        self._num_experts = experts
        self._layers = [_Layer(number, [0.0] * experts) for number in range(len(keys))]
        self._keys = {id(key): layer for key, layer in zip(keys, self._layers, strict=True)}
        self._current: _Layer | None = None

    @property
    def slots(self) -> S_co:
        return self._slots

    @property
    def bytes_to_stream(self) -> int:
        """Bytes of slots that let experts be read while others compute."""
        slots = slots_to_stream(layers=len(self._layers), experts=self._num_experts)
        return slots * self._slots.tensors.slot_bytes

    def fit(self: WeightStreamer[ResizableSlots], free_bytes: Callable[[], int], working: int) -> None:
        """Change the number of slots to what the next forward pass leaves memory for. Called between two passes.

        Args:
            free_bytes: returns how many bytes this process may still take.
            working: bytes that the pass takes in addition to what the process has now.
        """
        slots, most = self._slots, self._slots.tensors.count
        wanted = slots_that_fit(
            slots.table.num_slots,
            free=free_bytes(),
            held=slots.num_bytes,
            working=working,
            slot_bytes=slots.tensors.slot_bytes,
            least=self._num_experts,
            most=most,
        )
        if wanted == slots.table.num_slots:
            return
        began = time.perf_counter()
        self._residency = plan_residency(wanted, layers=len(self._layers), experts=self._num_experts)
        if self._current is not None:
            self._leave(self._current)
            self._current = None
        with self._counters.clock.part("weights"):
            for layer in self._layers:
                stays = to_keep(sorted(layer.kept), layer.kept, layer.popularity, self._residency.kept)
                slots.free(layer.number, sorted(layer.kept - stays))
                layer.kept = stays
            for number, expert, was_read in slots.resize(wanted):
                layer = self._layers[number]
                self._counters.add("weights_unrouted", int(was_read and expert in layer.fresh))
                layer.kept.discard(expert)
                layer.fresh.discard(expert)
        self._counters.counts["weights_slots"] = wanted
        self._counters.add("weights_resizes")
        self._counters.add("weights_resize_us", round(1e6 * (time.perf_counter() - began)))

    def experts(
        self,
        x_TM: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        *,
        f32_output: bool = False,
        clamped: ClampedExperts | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a layer's experts: an `ExpertRunner`. `w13` is the layer's key, and `w2` is not read.

        The biases of `clamped` are resident.
        """
        layer = self._keys[id(w13)]
        routed = self._routed(topk_ids_TK)
        self._enter(layer)
        self._demand(layer, routed)
        self._look_ahead(layer, *topk_ids_TK.shape)
        with self._counters.clock.part("weights"):
            self._slots.wait(layer.number, routed)
        return self._compute(layer.number, x_TM, topk_weights_TK, topk_ids_TK, f32_output=f32_output, clamped=clamped)

    def _routed(self, ids_TK: torch.Tensor) -> list[int]:
        num_rows, top_k = ids_TK.shape
        if not self._reads_routing and read_ahead_pays(num_rows, top_k=top_k, experts=self._num_experts):
            return list(range(self._num_experts))
        asked = torch.zeros(self._num_experts + 1, dtype=torch.bool, device=ids_TK.device)
        asked.scatter_(0, ids_TK.flatten().long() + 1, True)
        # The host must know which experts to fetch: it waits for the device here.
        return [expert for expert, is_asked in enumerate(asked[1:].tolist()) if is_asked]

    def _enter(self, layer: _Layer) -> None:
        """Make this the current layer, and leave the one before. A large group enters a layer in several calls."""
        if self._current is not layer:
            if self._current is not None:
                self._leave(self._current)
            self._current = layer

    def _leave(self, layer: _Layer) -> None:
        for expert in range(self._num_experts):
            layer.popularity[expert] *= _POPULARITY_DECAY
        for expert in layer.routed:
            layer.popularity[expert] += 1.0
        self._counters.add("weights_routed", len(layer.routed))
        self._counters.add("weights_kept", len(layer.routed - layer.fresh))
        self._counters.add("weights_unrouted", len(layer.fresh - layer.routed))
        present = self._slots.table.present(layer.number)
        layer.kept = to_keep(present, layer.kept, layer.popularity, self._residency.kept)
        with self._counters.clock.part("weights"):
            self._slots.free(layer.number, [expert for expert in present if expert not in layer.kept])
        layer.fresh.clear()
        layer.routed.clear()
        totals = self._slots.totals()
        self._counters.counts["weights_read"] = totals.experts
        self._counters.counts["weights_bytes_read"] = totals.bytes

    def _demand(self, layer: _Layer, routed: list[int]) -> None:
        present = set(self._slots.table.present(layer.number))
        if not layer.routed:
            waiting = layer.fresh - set(routed)
            layer.fresh -= set(self._slots.drop(layer.number, sorted(waiting)))
        self._slots.hurry(layer.number, [expert for expert in routed if expert in layer.fresh])
        self._ask(layer, [expert for expert in routed if expert not in present], urgent=True)
        layer.routed.update(routed)

    def _look_ahead(self, layer: _Layer, rows: int, top_k: int) -> None:
        coming = self._layers[(layer.number + 1) % len(self._layers)]
        if coming is layer or not read_ahead_pays(rows, top_k=top_k, experts=self._num_experts):
            return
        present = set(self._slots.table.present(coming.number))
        absent = [expert for expert in range(self._num_experts) if expert not in present]
        absent.sort(key=lambda expert: -coming.popularity[expert])
        self._ask(coming, absent[: self._slots.table.num_free], urgent=False)

    def _make_room(self, wanted: int, layer: _Layer) -> None:
        """Free slots of experts that were read ahead for layers that were not visited, as after an aborted pass."""
        for other in self._layers:
            if self._slots.table.num_free >= wanted:
                return
            if other is not layer and other.fresh:
                other.fresh -= set(self._slots.drop(other.number, sorted(other.fresh)))
                self._counters.add("weights_unrouted", len(other.fresh))
                self._slots.free(other.number, sorted(other.fresh))
                other.fresh.clear()

    def _ask(self, layer: _Layer, experts: list[int], *, urgent: bool) -> None:
        self._make_room(len(experts), layer)
        self._slots.ask(layer.number, experts, urgent=urgent)
        layer.fresh.update(experts)
