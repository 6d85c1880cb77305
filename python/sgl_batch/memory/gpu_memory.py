"""Owns reading how much memory of this process's GPU is taken; decides nothing about how much may be."""

from __future__ import annotations

import torch

from sgl_batch.core.gpu_reserves import GpuReading


def read_gpu() -> GpuReading:
    """A look at torch's current GPU. The first one opens a context there, unless there is one."""
    return GpuReading(
        free=torch.cuda.mem_get_info()[0],
        held=torch.cuda.memory_reserved(),
        processors=torch.cuda.get_device_properties().multi_processor_count,
    )
