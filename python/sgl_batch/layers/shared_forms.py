"""Owns the forms of 4 or 8 bits of weights that ranks share: one rank finds the form of each, and all learn it.

add      each rank adds the same weights in the same order, and packs those that it takes in memory of its own
settle   all ranks learn the forms; what has one moves to a smaller place in the shared memory
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl_batch.distributed.shared_arena import SharedArena
from sgl_batch.layers.packed_forms import Packed
from sgl_batch.layers.small_weights import GROUPED_FORMS, GroupedForm

SmallForm = tuple[GroupedForm, list[torch.Tensor]]
"""The form that some weights have in common, and the data of each in it."""

_NONE = 0


@dataclass(frozen=True, slots=True)
class _Added:
    """Weights that are packed in one form; `small`: that and their data, if this rank takes them and they have one."""

    alike: list[Packed]
    small: SmallForm | None
    is_ours: bool


class SharedForms:
    """The forms of the weights in an arena."""

    def __init__(self, arena: SharedArena) -> None:
        self._arena = arena
        self._added: list[_Added] = []

    def takes(self, alike: Sequence[Packed]) -> bool:
        """Return whether this rank packs these weights. All ranks ask in one order."""
        return self._arena.takes(sum(packed.weight.nbytes for packed in alike))

    def add(self, alike: list[Packed], small: SmallForm | None, *, is_ours: bool) -> None:
        """Add weights, packed if they are this rank's: into `small`, or where they lie."""
        self._added.append(_Added(alike, small, is_ours))

    def settle(self) -> None:
        """Give all weights the forms that were found. Every rank of the engine calls it, before the arena is sealed."""
        added, self._added = self._added, []
        if not added:
            return
        numbers = self._arena.empty((len(added),), torch.uint8)
        for index, one in enumerate(added):
            if one.is_ours:
                numbers[index] = _NONE if one.small is None else 1 + GROUPED_FORMS.index(one.small[0])
        self._arena.barrier()
        for number, one in zip(numbers.tolist(), added, strict=True):
            if number != _NONE:
                self._move(one, GROUPED_FORMS[number - 1])

    def _move(self, one: _Added, form: GroupedForm) -> None:
        for index, packed in enumerate(one.alike):
            exact, room = packed.matrices, form.room(packed.shape, self._arena.empty)
            if one.small is not None:
                room.copy_(one.small[1][index])
                self._arena.release(exact)
            packed.grouped, packed.weight.data = form, room.view(*packed.weight.shape[:-1], -1)
