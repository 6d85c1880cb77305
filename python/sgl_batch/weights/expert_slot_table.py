"""Owns which slot each expert has, and which slots are free. What lies in a slot, and when, is decided elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_NOWHERE = -1


class ExpertSlotTable:
    """`slot_of` [L, E], int32, on the host, is the slot of every expert, or -1. All `num_slots` are free at first."""

    def __init__(self, layers: int, experts: int, num_slots: int) -> None:
        self.slot_of = torch.full((layers, experts), _NOWHERE, dtype=torch.int32)
        self.num_slots = num_slots
        self._free = list(range(num_slots))[::-1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def present(self, layer: int) -> list[int]:
        """The experts of a layer that have a slot, in their order."""
        found: list[int] = (self.slot_of[layer] != _NOWHERE).nonzero().flatten().tolist()
        return found

    def slots(self, layer: int, experts: Sequence[int]) -> torch.Tensor:
        """The slots of experts, int64."""
        return self.slot_of[layer, torch.tensor(experts, dtype=torch.int64)].to(torch.int64)

    def take(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Give experts free slots, of which there are enough: the first of them, in their order."""
        taken = [self._free.pop() for _ in experts]
        self.slot_of[layer, torch.tensor(experts, dtype=torch.int64)] = torch.tensor(taken, dtype=torch.int32)
        return taken

    def release(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Take their slots from experts; returns these, which are free now."""
        slots: list[int] = self.slots(layer, experts).tolist()
        self._free.extend(slots)
        self._free.sort(reverse=True)
        self.slot_of[layer, torch.tensor(experts, dtype=torch.int64)] = _NOWHERE
        return slots

    def resize(self, num_slots: int) -> None:
        """There are `num_slots` from now on. No expert has one of those that go."""
        if num_slots < self.num_slots:
            self._free = [slot for slot in self._free if slot < num_slots]
        else:
            self._free[:0] = range(num_slots - 1, self.num_slots - 1, -1)
        self.num_slots = num_slots
