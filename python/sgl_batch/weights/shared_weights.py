"""Owns loading weights that are equal on all ranks once for the ranks that share memory, each rank some of them.

These are the large matrices outside the experts, of which each rank has its own. A rank loads those of its layers into
the shared memory, and its experts and all small tensors into its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor, nn

from sgl_batch.distributed.rank_context import RankContext
from sgl_batch.distributed.shared_arena import SharedArena, padded, shared_arena
from sgl_batch.sglang_adapter.checkpoint_loading import WeightWatch
from sgl_batch.weights.load_share import LoadShare, is_equal_matrix


class SharedWeights:
    """A `WeightWatch` around another one, which sees what this rank loads.

    Args:
        watch: the other one.
        ranks: this rank's context.
        loads: what this rank loads of a checkpoint, which then learns what others load for it.
        small_bytes: the bytes of the smaller form that a weight may take, for which the shared memory has room too.
        may_share: whether a model's weights are only copied while they are loaded. Of others, nothing is shared.
        share: called with the memory as soon as the weights to be shared lie in it. They are not loaded yet.
    """

    def __init__(
        self,
        watch: WeightWatch,
        ranks: RankContext,
        *,
        loads: LoadShare,
        small_bytes: Callable[[Tensor], int],
        may_share: Callable[[nn.Module], bool],
        share: Callable[[SharedArena], None],
    ) -> None:
        self._watch, self._ranks, self._loads = watch, ranks, loads
        self._small_bytes, self._may_share, self._share = small_bytes, may_share, share

    def load(
        self,
        model: nn.Module,
        weights: Iterable[tuple[str, Tensor]],
        load_weights: Callable[[Iterable[tuple[str, Tensor]]], object],
    ) -> None:
        """Load `weights` with the other ranks. Every rank calls it, and waits until all have loaded theirs."""
        arena = self._place(model) if self._may_share(model) else None
        if arena is None:
            self._watch.load(model, self._own(weights), load_weights)
            return
        self._share(arena)
        self._loads.divide(arena.index, arena.num_sharers)

        def load_together(own: Iterable[tuple[str, Tensor]]) -> None:
            arena.barrier()  # what the watch writes to parameters before they are loaded is written
            load_weights(own)
            arena.barrier()

        self._watch.load(model, self._own(weights), load_together)

    def _own(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return (one for one in weights if self._loads.has(one[0], one[1].shape) or not one[1].is_floating_point())

    def _place(self, model: nn.Module) -> SharedArena | None:
        """Move the parameters to be shared, which hold nothing yet, to memory that the ranks share."""
        found = {one.data_ptr(): one for name, one in model.named_parameters() if _is_shared(name, one)}
        room = sum(padded(one.nbytes) + self._small_bytes(one) for one in found.values())
        if not found:
            return None
        arena = shared_arena(self._ranks.process_group("weights", "gloo"), room)
        if arena is not None:
            places = {address: arena.empty(one.shape, one.dtype) for address, one in found.items()}
            for name, one in model.named_parameters(remove_duplicate=False):
                if _is_shared(name, one) and one.data_ptr() in places:
                    one.data = places[one.data_ptr()]
        return arena


def _is_shared(name: str, parameter: Tensor) -> bool:
    return is_equal_matrix(name, parameter.shape) and parameter.is_floating_point() and parameter.is_contiguous()
