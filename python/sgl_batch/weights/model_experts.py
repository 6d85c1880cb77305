"""Owns what a model's experts are to this rank: where they lie in their files, and the memory that they take packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl_batch.checkpoint.quantised import FP8_BITS, INT8_BITS, INTEGER_BITS, MXFP4_BITS, GroupedBits
from sgl_batch.core.quantised_form import QuantisedForm
from sgl_batch.core.weight_residency import WeightResidency, plan_residency, slots_to_stream
from sgl_batch.errors import ConfigError
from sgl_batch.layers.moe.clamped_experts import clamped_experts_of
from sgl_batch.layers.packed_weights import PANEL
from sgl_batch.layers.small_weights import GROUPED_FORMS, GroupedForm
from sgl_batch.memory.huge_pages import prefer_huge_pages
from sgl_batch.sglang_adapter.layers import expert_layers
from sgl_batch.weights.expert_checkpoint import ExpertLocations, find_experts
from sgl_batch.weights.expert_slots import SlotTensors

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelExperts:
    """A model's experts on this rank, and where they lie.

    `keys`: each layer's gate and up weights, in the order of `expert_layers`.
    """

    keys: list[torch.Tensor]
    locations: ExpertLocations

    @classmethod
    def of(
        cls, model: torch.nn.Module, files: Sequence[str], expert_shard: int, form: QuantisedForm | None = None
    ) -> ModelExperts:
        """Find the experts of a shard in a checkpoint of this form. Raises ConfigError where they are not all alike."""
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


def slot_bytes_of(locations: ExpertLocations, *, int8: bool) -> int:
    """Return the bytes of a slot's weights."""
    form = grouped_form(locations)
    if form is not None:
        return form.bits.num_bytes(3 * locations.hidden * locations.inter)
    return locations.expert_bytes // (locations.dtype.itemsize if int8 else 1)


def grouped_form(locations: ExpertLocations) -> GroupedForm | None:
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


def slot_tensors(locations: ExpertLocations, count: int, *, int8: bool) -> SlotTensors:
    """Return so many slots, which take memory as they are written to."""
    form = grouped_form(locations)
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
