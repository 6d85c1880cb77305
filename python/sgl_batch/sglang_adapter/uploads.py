"""Copies of host numbers to a device for which the host does not wait. What they are for is the caller's affair."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def upload(numbers: Sequence[int], dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    """Host numbers as a tensor [N] of the device.

    A copy from memory that is not pinned waits for all work that the device has been given.
    """
    return torch.tensor(numbers, dtype=dtype, pin_memory=_is_gpu(device)).to(device, non_blocking=True)


def upload_copy(host: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """A host tensor as it is now, on the device; the host may change its own at once."""
    staged = torch.empty(host.shape, dtype=host.dtype, pin_memory=_is_gpu(device)).copy_(host)
    return staged.to(device, non_blocking=True)


def _is_gpu(device: str | torch.device) -> bool:
    return torch.device(device).type == "cuda"
