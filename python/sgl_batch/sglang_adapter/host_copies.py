"""Copies between host and device for which the host does not wait. What they are for is the caller's affair."""

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


class Download:
    """A tensor of the device on its way to the host, behind the work that the device was given before."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor.to("cpu", non_blocking=True)  # to pinned memory, by torch's rule
        self._end = torch.get_device_module(tensor.device).Event()
        self._end.record()

    @property
    def done(self) -> bool:
        """Whether it is on the host."""
        return bool(self._end.query())

    def wait(self) -> torch.Tensor:
        """The tensor on the host, once it is there."""
        self._end.synchronize()
        return self._host


def _is_gpu(device: str | torch.device) -> bool:
    return torch.device(device).type == "cuda"
