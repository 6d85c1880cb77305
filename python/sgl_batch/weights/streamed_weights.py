"""Owns the setup of streamed weights for a loaded model: where its experts lie, and how much memory they get."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from sgl_batch.checkpoint.model_directory import form_of_weights
from sgl_batch.checkpoint.quantised import FP8_BITS, INT8_BITS, INTEGER_BITS, MXFP4_BITS, GroupedBits
from sgl_batch.config import MemoryConfig
from sgl_batch.core.quantised_form import QuantisedForm
from sgl_batch.core.weight_residency import WeightResidency, plan_residency, slots_to_stream
from sgl_batch.errors import ConfigError
from sgl_batch.layers.moe.clamped_experts import clamped_experts_of
from sgl_batch.layers.moe.expert_runner import ExpertRunner
from sgl_batch.layers.packed_weights import PANEL
from sgl_batch.layers.small_weights import GROUPED_FORMS, GroupedForm
from sgl_batch.memory.free_memory import machine_bytes
from sgl_batch.memory.huge_pages import prefer_huge_pages
from sgl_batch.metrics.counters import Counters
from sgl_batch.sglang_adapter.layers import expert_layers
from sgl_batch.weights.device_expert_slots import DeviceExpertSlots, PrefetchStream
from sgl_batch.weights.expert_checkpoint import ExpertLocations, find_experts
from sgl_batch.weights.expert_slots import ExpertSlots, SlotTensors
from sgl_batch.weights.host_experts import read_experts
from sgl_batch.weights.weight_streamer import WeightStreamer, packed_compute, plain_compute

logger = logging.getLogger(__name__)

_MIB = 1 << 20


def stream_experts(
    model: torch.nn.Module,
    files: Sequence[str],
    memory: MemoryConfig,
    *,
    expert_shard: int,
    int8: bool,
    kernels: ModuleType,
    counters: Counters,
) -> WeightStreamer[ExpertSlots]:
    """Return the streamer of a model that was loaded without its experts, for the experts of this rank's shard.

    Raises ConfigError if the checkpoint or the memory does not allow it.
    """
    form = form_of_weights(str(Path(files[0]).parent)) if files else None
    found = _Experts.of(model, files, expert_shard, form)
    locations = found.locations
    slot_bytes = _slot_bytes(locations, int8=int8)
    # Slots without an expert take no memory. Without a limit (--weight-memory), each pass decides how many to use.
    machine = machine_bytes()
    residency = found.plan(memory.weight_memory or machine, slot_bytes)
    slots = ExpertSlots(
        locations, _slot_tensors(locations, residency.slots, int8=int8), num_threads=memory.weight_read_threads
    )
    room = f"{residency.slots} ({residency.slots * slot_bytes / _MIB:.0f} MiB), {residency.kept} of a layer stay"
    logger.info(
        "weights: %s, %s; read %s the page cache",
        found.summary,
        f"in memory for {room}" if memory.weight_memory else "as many in memory as each pass leaves room for",
        "past" if slots.direct else "through",
    )
    return WeightStreamer(slots, residency, found.keys, compute=packed_compute(kernels, slots), counters=counters)


def stream_experts_to_device(
    model: torch.nn.Module,
    files: Sequence[str],
    memory: MemoryConfig,
    *,
    expert_shard: int,
    device: torch.device,
    runner: ExpertRunner,
    stream: PrefetchStream,
    counters: Counters,
) -> WeightStreamer[DeviceExpertSlots]:
    """As stream_experts, for a GPU: experts are read into host memory, and copied from there to the device's slots.

    Not yet run on a GPU. Raises ConfigError.
    """
    found = _Experts.of(model, files, expert_shard)
    locations = found.locations
    wanted = memory.weight_memory or found.bytes_to_stream(locations.expert_bytes)
    residency = found.plan(wanted, locations.expert_bytes)
    tensors = SlotTensors(
        w13=torch.empty(residency.slots, 2 * locations.inter, locations.hidden, dtype=locations.dtype, device=device),
        w2=torch.empty(residency.slots, locations.hidden, locations.inter, dtype=locations.dtype, device=device),
    )
    slots = DeviceExpertSlots(read_experts(locations, memory.weight_read_threads), tensors, stream)
    logger.info(
        "weights: %s, all in host memory, on the device %d (%.0f MiB), %d of a layer stay",
        found.summary,
        residency.slots,
        residency.slots * locations.expert_bytes / _MIB,
        residency.kept,
    )
    compute = plain_compute(runner, slots)
    return WeightStreamer(slots, residency, found.keys, compute=compute, counters=counters, reads_routing=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Experts:
    """A model's experts on this rank, and where they lie. `keys`: each layer's gate and up weights."""

    keys: list[torch.Tensor]
    locations: ExpertLocations

    @classmethod
    def of(
        cls, model: torch.nn.Module, files: Sequence[str], expert_shard: int, form: QuantisedForm | None = None
    ) -> _Experts:
        layers_of_experts = set(expert_layers(model))
        modules = {name: module for name, module in model.named_modules() if module in layers_of_experts}
        if not modules:
            raise ConfigError(f"{type(model).__name__} has no unquantised experts to stream: use --weights resident")
        first = next(iter(modules.values()))
        experts = first.w13_weight.shape[0]
        own = range(expert_shard * experts, (expert_shard + 1) * experts)
        stacked = clamped_experts_of(first) is not None
        locations = find_experts(files, list(modules), own, stacked=stacked, form=form)
        _check(locations, first.w13_weight, first.w2_weight)
        return cls(keys=[module.w13_weight for module in modules.values()], locations=locations)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of layers, and of experts in each."""
        layers, experts = self.locations.file_offsets.shape[:2]
        return layers, experts

    @property
    def summary(self) -> str:
        layers, experts = self.shape
        size = layers * experts * self.locations.expert_bytes / _MIB
        return f"{layers} layers of {experts} experts ({size:.0f} MiB in their files)"

    def bytes_to_stream(self, slot_bytes: int) -> int:
        """Bytes that streaming needs: two layers of experts."""
        layers, experts = self.shape
        return slots_to_stream(layers=layers, experts=experts) * slot_bytes

    def plan(self, wanted: int, slot_bytes: int) -> WeightResidency:
        """Return which experts stay in `wanted` bytes. Raises ConfigError if that is too little."""
        layers, experts = self.shape
        try:
            return plan_residency(wanted // slot_bytes, layers=layers, experts=experts)
        except ConfigError as error:
            raise ConfigError(
                f"weight_memory is {wanted} bytes; {error}, which are {experts * slot_bytes} bytes: give at least "
                f"that, better {self.bytes_to_stream(slot_bytes)}, and up to {layers * experts * slot_bytes} for all "
                "layers"
            ) from error


def _check(locations: ExpertLocations, w13: torch.Tensor, w2: torch.Tensor) -> None:
    if tuple(w2.shape[1:]) != (locations.hidden, locations.inter) or w13.shape[1] != 2 * locations.inter:
        raise ConfigError(
            f"the checkpoint's experts are [{locations.inter}, {locations.hidden}] and the model's "
            f"{list(w2.shape[1:])}: its config.json is of another model"
        )
    if w13.dtype != locations.computed:
        raise ConfigError(
            f"the model computes in {w13.dtype} and its experts lie in the checkpoint as {locations.dtype}; streamed "
            f"weights are not converted: leave out --dtype, or give --dtype {str(locations.computed).split('.')[-1]}"
        )


def _slot_bytes(locations: ExpertLocations, *, int8: bool) -> int:
    """Return the bytes of a slot's weights."""
    form = _grouped_form(locations)
    if form is not None:
        return form.bits.num_bytes(3 * locations.hidden * locations.inter)
    return locations.expert_bytes // (locations.dtype.itemsize if int8 else 1)


def _grouped_form(locations: ExpertLocations) -> GroupedForm | None:
    """Return the form of slots that take numbers of 4 or 8 bits as they lie in the files; None for floats.

    Raises ConfigError if there is none.
    """
    forms: Sequence[GroupedBits]
    if locations.scales is not None:
        forms = INT8_BITS if locations.dtype == torch.int8 else FP8_BITS
        sharing = locations.scales.block[1]
    elif locations.four_bits is not None:
        forms = (MXFP4_BITS,) if locations.four_bits.are_mxfp4 else INTEGER_BITS
        sharing = locations.four_bits.group
    else:
        return None
    sizes = [one for one in (locations.hidden, locations.inter, sharing) if one]
    fitting = [one for one in GROUPED_FORMS if one.bits in forms and not any(size % one.bits.group for size in sizes)]
    if not fitting or locations.hidden % PANEL or locations.inter % PANEL:
        raise ConfigError(
            f"quantised experts are [{locations.inter}, {locations.hidden}], and {sizes[-1]} inputs share a scale; "
            "streamed ones have multiples of 32: use --weights resident"
        )
    return fitting[0]


def _slot_tensors(locations: ExpertLocations, count: int, *, int8: bool) -> SlotTensors:
    form = _grouped_form(locations)
    if form is not None:
        shapes = (count, 2 * locations.inter, locations.hidden), (count, locations.hidden, locations.inter)
        w13, w2 = (form.room(shape) for shape in shapes)
        return SlotTensors(w13=w13, w2=w2)
    dtype = torch.int8 if int8 else locations.dtype
    w13 = torch.empty(count, 2 * locations.inter, locations.hidden, dtype=dtype)
    w2 = torch.empty(count, locations.hidden, locations.inter, dtype=dtype)
    for tensor in (w13, w2):
        prefer_huge_pages(tensor)
    if not int8:
        return SlotTensors(w13=w13, w2=w2)
    return SlotTensors(w13=w13, w2=w2, w13_scales=torch.empty(w13.shape[:2]), w2_scales=torch.empty(w2.shape[:2]))
