"""Streamed experts compute as resident ones do, and each is read no more often than needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("sgl_batch_kernel.expert_loader")
from streamed_layers import EXPERTS, HIDDEN, INTER, LAYERS, StreamedLayers, routed

MANY, FEW = 40, 2  # tokens of a group that uses nearly all experts, and of one that uses a few
ALL = LAYERS * EXPERTS
pytestmark = pytest.mark.usefixtures("one_thread")
# Slots for one layer, a few more, two layers, two layers and some that stay, all but one, all.
MEMORY = (EXPERTS, EXPERTS + 3, 2 * EXPERTS, 2 * EXPERTS + 4 * (LAYERS - 2), ALL - 1, ALL)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread, which is faster for experts this small."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(number)


@pytest.mark.parametrize("slots", MEMORY)
def test_streamed_results_equal_resident_ones_and_every_read_is_counted(slots: int, tmp_path: Path) -> None:
    model = StreamedLayers(tmp_path, slots, seed=slots)
    asked = 0
    for rows in (MANY, FEW, MANY, MANY, 1, FEW, 0, FEW, MANY):
        for layer in range(LAYERS):
            ids = model.routing(rows)
            model.visit(layer, ids)
            asked += len(routed(ids))
    model.leave_all()
    assert model.count("routed") == asked
    read, kept, unrouted = model.count("read"), model.count("kept"), model.count("unrouted")
    assert read == asked - kept + unrouted
    assert model.count("bytes_read") == read * model.locations.expert_bytes
    if slots == ALL:
        assert read <= ALL, "each expert once"


@pytest.mark.parametrize("int8", [False, True])
def test_stacked_experts_with_biases_compute_the_bits_of_resident_ones(int8: bool, tmp_path: Path) -> None:
    model = StreamedLayers(tmp_path, EXPERTS + 3, clamped=True, int8=int8)
    for rows in (MANY, FEW, 0, MANY):
        for layer in range(LAYERS):
            model.visit(layer, model.routing(rows))
    model.leave_all()
    assert model.count("bytes_read") == model.count("read") * model.locations.expert_bytes
    staged = 2 * 2 * HIDDEN * INTER * 2 if int8 else 0  # of two threads, in bf16
    assert model.slots.staging_bytes == staged


@pytest.mark.parametrize("slots", MEMORY)
def test_a_small_group_reads_only_the_experts_it_uses(slots: int, tmp_path: Path) -> None:
    model = StreamedLayers(tmp_path, slots)
    absent = 0
    for _ in range(12):
        for layer in range(LAYERS):
            ids = model.routing(FEW)
            absent += len(routed(ids) - set(model.slots.table.present(layer)))
            model.visit(layer, ids)
    model.leave_all()
    assert model.count("unrouted") == 0
    assert model.count("read") == absent
    assert model.count("bytes_read") == absent * model.locations.expert_bytes
    assert (model.count("kept") > 0) == (model.residency.kept > 0)


def test_with_memory_for_all_experts_a_second_pass_reads_nothing(tmp_path: Path) -> None:
    model = StreamedLayers(tmp_path, ALL)
    everything = torch.arange(EXPERTS).view(-1, 3)
    for _ in range(3):
        for layer in range(LAYERS):
            model.visit(layer, everything)
    model.leave_all()
    assert model.count("read") == ALL
    assert model.count("kept") == 2 * ALL


def test_the_most_used_experts_stay(tmp_path: Path) -> None:
    model = StreamedLayers(tmp_path, 2 * EXPERTS + 4 * (LAYERS - 2))
    assert model.residency.kept == 4
    popular = {layer: set(torch.randperm(EXPERTS)[:4].tolist()) for layer in range(LAYERS)}
    for number in range(12):
        for layer in range(LAYERS):
            others = sorted(set(range(EXPERTS)) - popular[layer])
            seldom = others[number % len(others)]
            model.visit(layer, torch.tensor([[*sorted(popular[layer])[:3]], [*sorted(popular[layer])[2:], seldom]]))
    model.leave_all()
    assert {layer: set(model.slots.table.present(layer)) for layer in range(LAYERS)} == popular
    assert model.count("read") <= LAYERS * (4 + 12 + 1), "at first all are equals, and one that is popular later goes"


@pytest.mark.parametrize("slots", MEMORY)
def test_aborted_passes_lose_no_slot(slots: int, tmp_path: Path) -> None:
    model = StreamedLayers(tmp_path, slots, seed=slots)
    for last in (2, 0, 4, 1, 1, 3, 0, 0, 4, 4):
        for layer in range(last + 1):
            ids = model.routing(MANY if last % 2 else FEW)
            model.visit(layer, ids)
    model.leave_all()
    assert model.count("read") == model.count("routed") - model.count("kept") + model.count("unrouted")
    assert sum(len(model.slots.table.present(layer)) for layer in range(LAYERS)) <= LAYERS * model.residency.kept


@pytest.mark.parametrize("slots", MEMORY)
def test_several_calls_of_a_layer_read_no_expert_twice(slots: int, tmp_path: Path) -> None:
    model = StreamedLayers(tmp_path, slots)
    union = 0
    for layer in range(LAYERS):
        calls = [model.routing(FEW), model.routing(MANY, range(8)), model.routing(FEW), model.routing(MANY)]
        for ids in calls:
            model.visit(layer, ids)
        union += len(routed(torch.cat(calls)))
    model.leave_all()
    assert model.count("routed") == union
    assert model.count("kept") == 0
    assert model.count("read") == union + model.count("unrouted")


def test_slots_may_be_resized_between_passes(tmp_path: Path) -> None:
    model = StreamedLayers(tmp_path, ALL)
    asked = 0
    for room in (ALL, EXPERTS, 0, 3 * EXPERTS, 2 * EXPERTS + 1, ALL, ALL + 7, EXPERTS, ALL):
        model.fit(room)
        assert model.slots.table.num_slots == min(ALL, max(EXPERTS, room)), (
            "a layer's experts have room whatever is free"
        )
        for rows in (MANY, FEW):
            for layer in range(LAYERS):
                ids = model.routing(rows)
                model.visit(layer, ids)
                asked += len(routed(ids))
        assert model.slots.num_bytes <= model.slots.table.num_slots * model.slots.tensors.slot_bytes
    model.leave_all()
    assert model.count("routed") == asked
    assert model.count("read") == asked - model.count("kept") + model.count("unrouted")
    assert model.count("slots") == ALL


def test_slots_grow_only_if_it_pays_and_shrink_at_once(tmp_path: Path) -> None:
    model = StreamedLayers(tmp_path, ALL)
    model.fit(40)
    model.fit(41)
    assert model.slots.table.num_slots == 40
    model.fit(42)
    assert model.slots.table.num_slots == 42
    model.fit(41)
    assert model.slots.table.num_slots == 41, "memory that a pass needs is given back at once"
