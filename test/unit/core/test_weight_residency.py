"""How many experts of each layer stay in memory, which of them, and when a layer is read ahead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_batch.core.weight_residency import plan_residency, read_ahead_pays, slots_that_fit, to_keep
from sgl_batch.errors import ConfigError

sizes = st.tuples(st.integers(1, 64), st.integers(1, 64), st.integers(0, 64 * 64 * 2))


@given(sizes)
def test_kept_and_passing_experts_fit_and_leave_no_slot_over(size: tuple[int, int, int]) -> None:
    layers, experts, more = size
    slots = experts + more
    plan = plan_residency(slots, layers=layers, experts=experts)
    if slots >= layers * experts:
        assert (plan.slots, plan.kept) == (layers * experts, experts), "no more memory than the model has experts"
        return
    assert plan.slots == slots
    assert 0 <= plan.kept < experts

    def needed(kept: int) -> int:
        """Kept experts of all layers but two; all experts of the layer that computes and of the next one."""
        return (layers - 2) * kept + 2 * experts

    assert plan.kept == 0 or needed(plan.kept) <= slots
    assert layers <= 2 or needed(plan.kept + 1) > slots, "another expert of each layer has no room"


@given(sizes)
def test_more_memory_never_keeps_less(size: tuple[int, int, int]) -> None:
    layers, experts, more = size
    fewer = plan_residency(experts + more, layers=layers, experts=experts)
    assert plan_residency(experts + more + 1, layers=layers, experts=experts).kept >= fewer.kept


@pytest.mark.parametrize("slots", [0, 1, 15])
def test_memory_for_less_than_a_layer_is_refused_with_the_numbers(slots: int) -> None:
    with pytest.raises(ConfigError, match=rf"memory for {slots} experts is less than the 16 of a layer"):
        plan_residency(slots, layers=4, experts=16)


@given(
    st.sets(st.integers(0, 31)),
    st.sets(st.integers(0, 31)),
    st.lists(st.integers(0, 3), min_size=32, max_size=32),
    st.integers(0, 40),
)
def test_the_most_popular_experts_stay_and_of_equals_those_kept_before(
    present: set[int], kept_before: set[int], popularity: list[int], room: int
) -> None:
    stays = to_keep(sorted(present), kept_before, popularity, room)
    assert stays <= present
    assert len(stays) == min(room, len(present))
    for expert in stays:
        for left in present - stays:
            assert popularity[expert] >= popularity[left]
            if popularity[expert] == popularity[left]:
                assert expert in kept_before or left not in kept_before
    assert to_keep(sorted(present, reverse=True), kept_before, popularity, room) == stays, "in any order"
    assert to_keep(sorted(present), stays, popularity, room) == stays, "nothing changes without new choices"


def test_a_layer_is_read_ahead_if_the_group_likely_chooses_nearly_all_experts() -> None:
    pays = [rows for rows in range(200) if read_ahead_pays(rows, top_k=8, experts=64)]
    assert pays == list(range(18, 200)), "0.875 to the 18th is the first below a tenth"
    assert read_ahead_pays(1, top_k=4, experts=4)
    assert not read_ahead_pays(0, top_k=4, experts=4)


@given(st.integers(1, 400), st.integers(0, 10**6), st.integers(0, 400), st.integers(0, 10**6), st.integers(1, 5000))
def test_expert_slots_fill_what_a_pass_leaves_and_never_more(
    now: int, free: int, held: int, working: int, slot_bytes: int
) -> None:
    least, most = 10, 300
    taken = min(held, now) * slot_bytes
    slots = slots_that_fit(now, free=free, held=taken, working=working, slot_bytes=slot_bytes, least=least, most=most)
    assert least <= slots <= most or slots == now
    fits = slots * slot_bytes <= free + taken - working
    assert fits or slots == least, "the least number of slots has room whatever is free"
    if slots < now and slots > least:
        assert (slots + 1) * slot_bytes > free + taken - working or slots == most, "nothing is given back for nothing"
