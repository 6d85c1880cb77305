"""Owns copies between host and device for which the host does not wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def upload(numbers: Sequence[int], dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    """Copy host numbers to a tensor [N] on the device, from pinned memory.

    A copy from memory that is not pinned would wait for all queued work of the device.
    """
    return torch.tensor(numbers, dtype=dtype, pin_memory=_is_gpu(device)).to(device, non_blocking=True)


def upload_copy(host: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """Copy a host tensor to the device. The caller may change the host tensor at once."""
    staged = torch.empty(host.shape, dtype=host.dtype, pin_memory=_is_gpu(device)).copy_(host)
    return staged.to(device, non_blocking=True)


class Download:
    """A copy of a device tensor to the host, which runs after the work queued before it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor.to("cpu", non_blocking=True)  # to pinned memory, by torch's rule
        self._end = torch.get_device_module(tensor.device).Event()
        self._end.record()

    @property
    def done(self) -> bool:
        """Whether the tensor is on the host."""
        return bool(self._end.query())

    def wait(self) -> torch.Tensor:
        """Wait for the copy, and return the tensor on the host."""
        self._end.synchronize()
        return self._host


def _is_gpu(device: str | torch.device) -> bool:
    return torch.device(device).type == "cuda"
