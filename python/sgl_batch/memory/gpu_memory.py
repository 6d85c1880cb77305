"""Owns reading how much memory of this process's GPU is taken and free."""

from __future__ import annotations

import torch

from sgl_batch.core.gpu_reserves import GpuReading


def read_gpu() -> GpuReading:
    """Return a reading of torch's current GPU. The first call opens a context there, if there is none."""
    return GpuReading(
        free=torch.cuda.mem_get_info()[0],
        held=torch.cuda.memory_reserved(),
        processors=torch.cuda.get_device_properties().multi_processor_count,
    )
