"""Owns parameters without memory, for experts whose weights stay in their files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

_EXPERT_WEIGHTS = ("w13_weight", "w2_weight")


def is_expert_parameter(name: str) -> bool:
    """Whether a parameter of this name, with or without its module's name, holds the weights of experts."""
    return name.rpartition(".")[2] in _EXPERT_WEIGHTS


@contextmanager
def unloaded_experts() -> Iterator[None]:
    """Inside, modules get parameters of experts with their shape and dtype, and memory for one number.

    These cannot be written to. They stand for weights that are elsewhere.
    """

    def shrink(_module: Any, name: str, parameter: torch.nn.Parameter | None) -> None:
        if name in _EXPERT_WEIGHTS and parameter is not None:
            parameter.data = parameter.data.new_zeros(1).expand(parameter.shape)

    handle = register_module_parameter_registration_hook(shrink)
    try:
        yield
    finally:
        handle.remove()
