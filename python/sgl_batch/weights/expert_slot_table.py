"""Owns which expert slot each expert has, and which slots are free. Which experts get one is decided elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_NOWHERE = -1


class ExpertSlotTable:
    """`slot_of` [L, E], int32, on the host: the slot of every expert, or -1. All `num_slots` are free at first."""

    def __init__(self, layers: int, experts: int, num_slots: int) -> None:
        self.slot_of = torch.full((layers, experts), _NOWHERE, dtype=torch.int32)
        self.num_slots = num_slots
        self._free = list(range(num_slots))[::-1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def present(self, layer: int) -> list[int]:
        """Return the experts of a layer that have a slot, in ascending order."""
        found: list[int] = (self.slot_of[layer] != _NOWHERE).nonzero().flatten().tolist()
        return found

    def slots(self, layer: int, experts: Sequence[int]) -> torch.Tensor:
        """Return the slots of experts, int64 [N]; -1 for one without a slot."""
        return self.slot_of[layer, torch.tensor(experts, dtype=torch.int64)].to(torch.int64)

    def expert_of(self, layer: int) -> torch.Tensor:
        """Return which expert of a layer each slot holds, int64 [num_slots]; 0 for a slot that holds none of them."""
        experts = self.present(layer)
        held = torch.zeros(self.num_slots, dtype=torch.int64)
        held[self.slots(layer, experts)] = torch.tensor(experts, dtype=torch.int64)
        return held

    def take(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Give experts free slots, of which there are enough: the lowest, in the order of experts."""
        taken = [self._free.pop() for _ in experts]
        self.slot_of[layer, torch.tensor(experts, dtype=torch.int64)] = torch.tensor(taken, dtype=torch.int32)
        return taken

    def release(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Free the slots of experts, and return the slots."""
        slots: list[int] = self.slots(layer, experts).tolist()
        self._free.extend(slots)
        self._free.sort(reverse=True)
        self.slot_of[layer, torch.tensor(experts, dtype=torch.int64)] = _NOWHERE
        return slots

    def resize(self, num_slots: int) -> None:
        """Set the number of slots. No expert has a slot beyond it."""
        if num_slots < self.num_slots:
            self._free = [slot for slot in self._free if slot < num_slots]
        else:
            self._free[:0] = range(num_slots - 1, self.num_slots - 1, -1)
        self.num_slots = num_slots
