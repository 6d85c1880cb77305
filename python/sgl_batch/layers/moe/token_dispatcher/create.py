"""Owns which implementation a dispatcher's name stands for, and what it needs. The caller chooses the name."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sgl_batch.errors import ConfigError
from sgl_batch.layers.moe.token_dispatcher.all_to_all import AllToAllDispatcher
from sgl_batch.layers.moe.token_dispatcher.base import TokenDispatcher
from sgl_batch.layers.moe.token_dispatcher.deepep import DeepEPDispatcher
from sgl_batch.layers.moe.token_dispatcher.local import LocalDispatcher
from sgl_batch.layers.moe.token_dispatcher.shared import SharedDispatcher
from sgl_batch.layers.moe.token_dispatcher.staged import StagedDispatcher

NAMES = ("local", "shared", "gloo", "nccl", "deepep")


_CPU = torch.device("cpu")


def create_token_dispatcher(
    name: str,
    group: dist.ProcessGroup | None,
    *,
    num_experts: int,
    hidden_size: int,
    device: torch.device = _CPU,
) -> TokenDispatcher:
    """Make the dispatcher `name` for this process's rank in `group` (None for `local`).

    Every rank of the group must call this: shared and deepep make their buffers together.

    Args:
        name: One of `NAMES`.
        group: The ranks that hold the expert shards, in order.
        num_experts: The experts of all ranks together.
        hidden_size: Numbers per token.
        device: Where tokens are. Tokens on a GPU go through the host with `shared` and `gloo`.

    Raises:
        ConfigError: The name is unknown, or the group or the machine does not fit it.
    """
    if name not in NAMES:
        raise ConfigError(f"the token dispatcher {name!r} is unknown; known: {', '.join(NAMES)}")
    if name == "local":
        if group is not None and group.size() > 1:
            raise ConfigError(f"the token dispatcher local serves one rank, not {group.size()}; choose gloo or nccl")
        return LocalDispatcher(num_experts=num_experts, hidden_size=hidden_size)
    if group is None:
        raise ConfigError(f"the token dispatcher {name} needs a process group; choose local for a single rank")
    if name == "deepep":
        return DeepEPDispatcher(group, num_experts=num_experts, hidden_size=hidden_size)
    transport = "gloo" if name == "shared" else name
    on = _device_of(transport)
    backends = dist.get_backend_config(group)
    if f"{on.type}:{transport}" not in backends.split(","):
        raise ConfigError(
            f"the token dispatcher {name} needs a process group with the backend {transport} for tensors on "
            f"{on.type}; this one has {backends}"
        )
    made: TokenDispatcher
    if name == "shared":
        made = SharedDispatcher(group, num_experts=num_experts, hidden_size=hidden_size)
    else:
        made = AllToAllDispatcher(group, device=on, num_experts=num_experts, hidden_size=hidden_size)
    return made if on.type == device.type or name == "nccl" else StagedDispatcher(made, device)


def _device_of(name: str) -> torch.device:
    if name == "gloo":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"the token dispatcher {name} needs a GPU, and torch sees none; choose gloo")
    return torch.device("cuda", torch.cuda.current_device())
