"""Owns setting up streamed weights for a loaded model: where its experts lie, and how much memory they get."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from sgl_batch.config import MemoryConfig
from sgl_batch.core.weight_residency import plan_residency
from sgl_batch.errors import ConfigError
from sgl_batch.layers.huge_pages import prefer_huge_pages
from sgl_batch.mem_cache.expert_checkpoint import ExpertPlaces, find_experts
from sgl_batch.mem_cache.expert_slots import ExpertSlots, SlotTensors
from sgl_batch.model_executor.counters import Counters
from sgl_batch.model_executor.weight_streamer import WeightStreamer
from sgl_batch.sglang_adapter.layers import expert_layers

logger = logging.getLogger(__name__)

_MIB = 1 << 20


def stream_experts(
    model: Any,
    files: Sequence[str],
    memory: MemoryConfig,
    *,
    rank: int,
    int8: bool,
    kernels: ModuleType,
    counters: Counters,
) -> WeightStreamer:
    """Let the experts of a model that was loaded without them come from `files`; of several ranks, this one's share.

    Raises ConfigError where the checkpoint or the memory does not allow it.
    """
    layers_of_experts = set(expert_layers(model))
    modules = {name: module for name, module in model.named_modules() if module in layers_of_experts}
    if not modules:
        raise ConfigError(f"{type(model).__name__} has no unquantised experts to stream: use --weights resident")
    first = next(iter(modules.values()))
    layers, experts = len(modules), first.w13_weight.shape[0]
    places = find_experts(files, list(modules), range(rank * experts, (rank + 1) * experts))
    _check(places, first.w13_weight, first.w2_weight)
    slot_bytes = places.expert_bytes // (places.dtype.itemsize if int8 else 1)
    # Slots without an expert take no memory: where nobody has said how many there are to be, each pass decides.
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted = memory.weight_memory or machine
    try:
        residency = plan_residency(wanted // slot_bytes, layers=layers, experts=experts)
    except ConfigError as error:
        raise ConfigError(
            f"weight_memory is {wanted} bytes; {error}, which are {experts * slot_bytes} bytes: give at least that, "
            f"better {2 * experts * slot_bytes}, and up to {layers * experts * slot_bytes} for all layers"
        ) from error
    slots = ExpertSlots(
        places, _slot_tensors(places, residency.slots, int8=int8), num_threads=memory.weight_read_threads
    )
    room = f"{residency.slots} ({residency.slots * slot_bytes / _MIB:.0f} MiB), {residency.kept} of a layer stay"
    logger.info(
        "weights: %d layers of %d experts (%.0f MiB in their files), %s; read %s the page cache",
        layers,
        experts,
        layers * experts * places.expert_bytes / _MIB,
        f"in memory for {room}" if memory.weight_memory else "as many in memory as each pass leaves room for",
        "past" if slots.direct else "through",
    )
    keys = [module.w13_weight for module in modules.values()]
    return WeightStreamer(slots, residency, keys, kernels=kernels, counters=counters)


def _check(places: ExpertPlaces, w13: torch.Tensor, w2: torch.Tensor) -> None:
    if tuple(w2.shape[1:]) != (places.hidden, places.inter) or w13.shape[1] != 2 * places.inter:
        raise ConfigError(
            f"the checkpoint's experts are [{places.inter}, {places.hidden}] and the model's {list(w2.shape[1:])}: its "
            "config.json is of another model"
        )
    if w13.dtype != places.dtype:
        raise ConfigError(
            f"the model computes in {w13.dtype} and its experts lie in the checkpoint as {places.dtype}; streamed "
            f"weights are not converted: leave out --dtype, or give --dtype {str(places.dtype).split('.')[-1]}"
        )


def _slot_tensors(places: ExpertPlaces, count: int, *, int8: bool) -> SlotTensors:
    dtype = torch.int8 if int8 else places.dtype
    w13 = torch.empty(count, 2 * places.inter, places.hidden, dtype=dtype)
    w2 = torch.empty(count, places.hidden, places.inter, dtype=dtype)
    for tensor in (w13, w2):
        prefer_huge_pages(tensor)
    if not int8:
        return SlotTensors(w13=w13, w2=w2)
    return SlotTensors(w13=w13, w2=w2, w13_scales=torch.empty(w13.shape[:2]), w2_scales=torch.empty(w2.shape[:2]))
