"""Slots of quantised experts that are filled from their files, beside the numbers of a load of the whole checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sgl_batch.core.quantised_form import QuantisedForm
from sgl_batch.errors import EngineError
from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers.small_weights import GroupedForm
from sgl_batch.weights.dequantised import Dequantised
from sgl_batch.weights.expert_checkpoint import ExpertLocations
from sgl_batch.weights.expert_slots import ExpertSlots, SlotTensors
from sgl_batch.weights.model_experts import grouped_form, slot_tensors

MODULE = "model.layers.0.mlp.experts"


def grouped(locations: ExpertLocations) -> GroupedForm:
    form = grouped_form(locations)
    assert form is not None
    return form


def empty_slots(locations: ExpertLocations) -> SlotTensors:
    """Return a slot for each expert."""
    return slot_tensors(locations, locations.file_offsets.shape[1], int8=False)


def filled(locations: ExpertLocations, *, direct: bool = True) -> SlotTensors:
    """Read all experts of a layer; return them in their order."""
    tensors, experts = empty_slots(locations), range(locations.file_offsets.shape[1])
    slots = ExpertSlots(locations, tensors, num_threads=2, direct=direct)
    slots.ask(0, experts, urgent=True)
    slots.wait(0, experts)
    where = slots.table.slot_of[0].tolist()
    assert slots.totals().bytes == len(experts) * locations.expert_bytes
    slots.close()
    return SlotTensors(w13=tensors.w13[where], w2=tensors.w2[where])


def fail_for(locations: ExpertLocations, expert: int, message: str) -> None:
    """Read all experts of a layer, of which one is an error with this message, and the others are there."""
    slots, experts = (
        ExpertSlots(locations, empty_slots(locations), num_threads=1),
        range(locations.file_offsets.shape[1]),
    )
    slots.ask(0, experts, urgent=True)
    slots.wait(0, [one for one in experts if one != expert])
    with pytest.raises(EngineError, match=message):
        slots.wait(0, [expert])
    slots.close()


def loaded_whole(file: Path, form: QuantisedForm, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return all numbers of a file, as a load has them. Each tensor's memory is used again, unless it is kept."""
    return {name: one.clone() for name, one in Dequantised(form, dtype)([str(file)], load_file(file).items())}


def numbers_of(locations: ExpertLocations, slots: SlotTensors) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return the gate, up and down matrices of each expert in slots."""
    form, experts = grouped(locations), len(slots.w2)
    assert slots.slot_bytes == form.bits.num_bytes(3 * locations.hidden * locations.inter)
    kernels = native_kernels()
    assert kernels is not None
    gate_up = form.unpack(kernels, slots.w13.view(2 * experts, locations.inter, -1), locations.hidden)
    down = form.unpack(kernels, slots.w2, locations.inter)
    return [(gate_up[2 * one], gate_up[2 * one + 1], down[one]) for one in range(experts)]


def hold(locations: ExpertLocations, slots: SlotTensors, whole: Mapping[str, torch.Tensor]) -> bool:
    """Return whether slots hold the matrices of their experts, each of which is a tensor of its own."""
    return all(
        torch.equal(found, whole[f"{MODULE}.{expert}.{name}_proj.weight"])
        for expert, matrices in enumerate(numbers_of(locations, slots))
        for name, found in zip(("gate", "up", "down"), matrices, strict=True)
    )
