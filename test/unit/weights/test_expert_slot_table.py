"""Every slot is free or one expert's, through taking, releasing and resizing."""

from __future__ import annotations

import random

from sgl_batch.weights.expert_slot_table import ExpertSlotTable

LAYERS, EXPERTS, MOST = 3, 8, 20


def held(table: ExpertSlotTable) -> list[int]:
    slots: list[int] = table.slot_of[table.slot_of >= 0].tolist()
    return slots


def test_an_expert_keeps_its_slot_until_it_is_released() -> None:
    table = ExpertSlotTable(LAYERS, EXPERTS, 5)
    taken = table.take(1, [6, 2])
    assert table.slots(1, [6, 2]).tolist() == taken
    assert (table.present(1), table.present(0), table.num_free) == ([2, 6], [], 3)
    assert table.release(1, [2]) == taken[1:]
    assert (table.present(1), table.num_free) == ([6], 4)
    assert (table.take(0, []), table.release(0, [])) == ([], [])


def test_a_slot_is_mapped_back_to_its_expert() -> None:
    table = ExpertSlotTable(LAYERS, EXPERTS, 5)
    table.take(0, [3])
    table.take(1, [6, 2])
    assert table.expert_of(1).tolist() == [0, 6, 2, 0, 0]
    assert table.expert_of(2).tolist() == [0] * 5


def test_no_slot_is_lost_or_taken_twice() -> None:
    dice, table = random.Random(0), ExpertSlotTable(LAYERS, EXPERTS, MOST)
    for _ in range(500):
        layer, present = dice.randrange(LAYERS), {layer: table.present(layer) for layer in range(LAYERS)}
        absent = [expert for expert in range(EXPERTS) if expert not in present[layer]]
        match dice.randrange(3):
            case 0:
                table.take(layer, dice.sample(absent, min(len(absent), dice.randrange(table.num_free + 1))))
            case 1:
                table.release(layer, dice.sample(present[layer], dice.randrange(len(present[layer]) + 1)))
            case _:
                size = dice.randrange(1, MOST + 1)
                for other, experts in present.items():
                    slots = table.slots(other, experts).tolist()
                    gone = [one for one, slot in zip(experts, slots, strict=True) if slot >= size]
                    table.release(other, gone)
                table.resize(size)
        slots = held(table)
        assert len(set(slots)) == len(slots)
        assert table.num_free + len(slots) == table.num_slots
        assert all(slot < table.num_slots for slot in slots)
