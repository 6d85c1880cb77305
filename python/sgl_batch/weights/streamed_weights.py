"""Owns the setup of streamed weights for a loaded model: where its experts lie, and how much memory they get."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from sgl_batch.checkpoint.model_directory import form_of_weights
from sgl_batch.config import MemoryConfig
from sgl_batch.layers.moe.expert_runner import ExpertRunner
from sgl_batch.memory.free_memory import machine_bytes
from sgl_batch.metrics.counters import Counters
from sgl_batch.weights.device_expert_slots import DeviceExpertSlots, PrefetchStream
from sgl_batch.weights.expert_slots import ExpertSlots, SlotTensors
from sgl_batch.weights.host_experts import read_experts
from sgl_batch.weights.model_experts import ModelExperts, slot_bytes_of, slot_tensors
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
    found = ModelExperts.of(model, files, expert_shard, form)
    locations = found.locations
    slot_bytes = slot_bytes_of(locations, int8=int8)
    # Slots without an expert take no memory. Without a limit (--weight-memory), each pass decides how many to use.
    machine = machine_bytes()
    residency = found.plan(memory.weight_memory or machine, slot_bytes)
    slots = ExpertSlots(
        locations, slot_tensors(locations, residency.slots, int8=int8), num_threads=memory.weight_read_threads
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
    found = ModelExperts.of(model, files, expert_shard)
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
