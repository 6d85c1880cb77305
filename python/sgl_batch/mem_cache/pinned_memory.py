"""Owns making host memory one that a GPU reads and writes by itself. Which memory, and how long, is the caller's."""

from __future__ import annotations

import torch

from sgl_batch.errors import ConfigError


def pin(memory: torch.Tensor, what: str, remedy: str) -> None:
    """Pin the memory of a tensor, all of it claimed from now on. Raises ConfigError, which names it `what`."""
    fault = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(fault) != 0:
        raise ConfigError(
            f"the GPU's driver does not pin {memory.nbytes} bytes of {what}: {fault}; lift the limit on locked memory "
            f"(ulimit -l), or {remedy}"
        )


def unpin(memory: torch.Tensor) -> None:
    """Nobody on the GPU uses the memory any more."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
