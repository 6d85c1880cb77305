"""Copies of host numbers to a device for which the host does not wait. What they are for is the caller's affair."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def upload(numbers: Sequence[int], dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    """Host numbers as a tensor [N] of the device.

    A copy from memory that is not pinned waits for all work that the device has been given.
    """
    on_gpu = torch.device(device).type == "cuda"
    return torch.tensor(numbers, dtype=dtype, pin_memory=on_gpu).to(device, non_blocking=True)
