"""Owns loading weights that are equal on all ranks once for the ranks that share memory, each rank some of them.

These are the large matrices outside the experts, of which each rank has its own. A rank loads those of its layers into
the shared memory, and its experts and all small tensors into its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from sgl_batch.distributed.rank_context import RankContext
from sgl_batch.distributed.shared_arena import SharedArena, padded, shared_arena
from sgl_batch.sglang_adapter.checkpoint_loading import WeightWatch

# Smaller ones are each rank's own: they take little, and some are computed and not loaded.
_LEAST_NUMBERS = 1 << 12
# In the names of matrices whose parts SGLang copies to other tensors as soon as they are loaded.
_COPIED = ".kv_b_proj."
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_SCALE_BYTES = 4


class SharedWeights:
    """A `WeightWatch` around another one, which sees what this rank loads.

    Args:
        watch: the other one.
        ranks: this rank's context.
        int8: weights will be rounded to int8, for which the shared memory then has room too.
        may_share: whether a model's weights are only copied while they are loaded. Of others, nothing is shared.
        share: called with the memory as soon as the weights to be shared lie in it. They are not loaded yet.
    """

    def __init__(
        self,
        watch: WeightWatch,
        ranks: RankContext,
        *,
        int8: bool,
        may_share: Callable[[nn.Module], bool],
        share: Callable[[SharedArena], None],
    ) -> None:
        self._watch, self._ranks, self._int8, self._may_share, self._share = watch, ranks, int8, may_share, share

    def load(
        self,
        model: nn.Module,
        weights: Iterable[tuple[str, Tensor]],
        load_weights: Callable[[Iterable[tuple[str, Tensor]]], object],
    ) -> None:
        """Load `weights` with the other ranks. Every rank calls it, and waits until all have loaded theirs."""
        arena = self._place(model) if self._may_share(model) else None
        if arena is None:
            self._watch.load(model, weights, load_weights)
            return
        self._share(arena)

        def load_together(own: Iterable[tuple[str, Tensor]]) -> None:
            arena.barrier()  # what the watch writes to parameters before they are loaded is written
            load_weights(own)
            arena.barrier()

        self._watch.load(model, _own(weights, arena.index, arena.num_sharers), load_together)

    def _place(self, model: nn.Module) -> SharedArena | None:
        """Move the parameters to be shared, which hold nothing yet, to memory that the ranks share."""
        found = {one.data_ptr(): one for name, one in model.named_parameters() if _is_shared(name, one)}
        room = sum(padded(one.nbytes) for one in found.values())
        if self._int8:
            room += sum(padded(one.numel()) + padded(_SCALE_BYTES * len(one)) for one in found.values())
        if not found:
            return None
        arena = shared_arena(self._ranks.process_group("weights", "gloo"), room)
        if arena is not None:
            places = {address: arena.empty(one.shape, one.dtype) for address, one in found.items()}
            for name, one in model.named_parameters(remove_duplicate=False):
                if _is_shared(name, one) and one.data_ptr() in places:
                    one.data = places[one.data_ptr()]
        return arena


def _is_shared(name: str, weight: Any) -> bool:
    """Return whether a parameter of a model, or a tensor of its checkpoint, has one form on all ranks and is large."""
    return (
        name.endswith(".weight")
        and ".experts." not in name
        and _COPIED not in name
        and weight.dim() == 2
        and weight.numel() >= _LEAST_NUMBERS
        and weight.is_floating_point()
        and weight.is_contiguous()
    )


def _own(weights: Iterable[tuple[str, Tensor]], index: int, num_ranks: int) -> Iterator[tuple[str, Tensor]]:
    """Leave out what other ranks load.

    All tensors of a layer fall to one rank, because some are joined before they are copied.
    """
    for name, weight in weights:
        layer = _LAYER.search(name)
        # Embeddings of inputs and of outputs fall to different ranks.
        number = int(layer[1]) if layer else (0 if "embed" in name else -1)
        if number % num_ranks == index or not _is_shared(name, weight):
            yield name, weight
