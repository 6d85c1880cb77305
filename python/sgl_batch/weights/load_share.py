"""Owns which tensors of a checkpoint one of several ranks loads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

from sgl_batch.checkpoint.expert_layout import expert_number, layer_number

# Smaller ones are each rank's own: they take little, and some are computed and not loaded.
_LEAST_NUMBERS = 1 << 12
# In the names of matrices whose parts SGLang copies to other tensors as soon as they are loaded.
_COPIED = ".kv_b_proj."
# In the names of matrices that SGLang joins before it copies them, and of what it joins them to: of any size, so that
# one rank has both.
_JOINED = re.compile(r"\.(?:q_a_proj|kv_a_proj_with_mqa|fused_qkv_a_proj_with_mqa)\.")


def is_equal_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether a tensor of this name and shape is a matrix that has one form on all ranks and is held once.

    It may be a parameter of a model, or a tensor of its checkpoint.
    """
    return (
        name.endswith(".weight")
        and ".experts." not in name
        and _COPIED not in name
        and len(shape) == 2
        and (prod(shape) >= _LEAST_NUMBERS or _JOINED.search(name) is not None)
    )


class LoadShare:
    """What one rank loads of a checkpoint: its experts, all small tensors, and of matrices that ranks share its part.

    `experts`: the numbers of this rank's experts in each layer; None if it has all of them.
    """

    def __init__(self, experts: range | None = None) -> None:
        self._experts = experts
        self._index, self._num_sharers = 0, 1

    def divide(self, index: int, num_sharers: int) -> None:
        """From now on, load only the part `index` of `num_sharers` of the matrices that are equal on all ranks."""
        self._index, self._num_sharers = index, num_sharers

    def experts_of(self, count: int) -> slice:
        """Return which of all the experts of a layer, so many in one tensor, are this rank's."""
        return slice(0, count) if self._experts is None else slice(self._experts.start, self._experts.stop)

    def has(self, name: str, shape: Sequence[int]) -> bool:
        """Return whether this rank loads a tensor; a quantised one is named and shaped as its floats."""
        expert = expert_number(name)
        if expert is not None:
            return self._experts is None or expert in self._experts
        return self._loader_of(name) == self._index or not is_equal_matrix(name, shape)

    def _loader_of(self, name: str) -> int:
        """Return the rank that loads an equal matrix: that of its layer, whose tensors are joined before copying.

        Embeddings of inputs and of outputs fall to different ranks.
        """
        layer = layer_number(name)
        if layer is None:
            layer = 0 if "embed" in name else -1
        return layer % self._num_sharers
