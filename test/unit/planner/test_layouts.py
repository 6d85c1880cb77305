"""How GPUs are shared out: which layouts there are, what of them is built, and what a rank has of model and batch."""

from __future__ import annotations

from dataclasses import replace

import made_profiles as made
import pytest

from sgl_batch.errors import ConfigError
from sgl_batch.planner.candidate import NOT_IMPLEMENTED, Candidate
from sgl_batch.planner.followed_run import Room
from sgl_batch.planner.layouts import (
    ONE_GPU,
    Layout,
    exchange_row_bytes,
    kv_parts,
    layouts,
    parse_gpus,
    rank_layers,
    share_of,
)
from sgl_batch.planner.model_layers import DENSE, MOE
from sgl_batch.planner.schedule import Prediction
from sgl_batch.planner.search import MemoryMap, Outcome, Planned, search_layouts
from sgl_batch.planner.workload import Request, Workload, parse_workload

MODEL = replace(made.layers(), kv_heads=4)
CANDIDATE = Candidate(b_attn_prefill=1, b_moe_prefill=1, b_attn_decode=1, b_moe_decode=1)


def sizes(found: list[Layout], *, tensor: bool = False) -> list[tuple[int, int]]:
    return [(one.instances, one.ranks) for one in found if one.tensor is tensor]


def test_the_ranks_of_an_instance_divide_the_gpus_and_the_experts():
    assert sizes(layouts(8, MODEL)) == [(8, 1), (4, 2), (2, 4), (1, 8)]
    assert sizes(layouts(6, MODEL)) == [(6, 1), (3, 2)]
    assert layouts(1, MODEL) == [ONE_GPU]


def test_a_model_without_experts_has_one_rank_in_an_instance():
    assert sizes(layouts(4, made.layers(DENSE))) == [(4, 1)]


def test_tensor_parallel_ranks_divide_the_kv_heads_or_share_one():
    assert sizes(layouts(8, MODEL), tensor=True) == [(4, 2), (2, 4), (1, 8)]
    assert sizes(layouts(6, MODEL), tensor=True) == [(3, 2), (1, 6)]
    assert [kv_parts(MODEL, Layout(ranks=ranks, tensor=True)) for ranks in (2, 4, 8)] == [2, 4, 4]


def test_tensor_parallel_ranks_and_several_machines_are_not_built():
    tensor, far, near = Layout(ranks=2, tensor=True), Layout(ranks=16), Layout(ranks=8, instances=2)
    assert not tensor.is_implemented
    assert not far.is_implemented
    assert near.is_implemented
    assert all(NOT_IMPLEMENTED in one.label for one in (tensor, far))
    assert tensor.flags == far.flags == []
    assert near.flags == ["--tp", "8", "--dp", "8", "--ep", "8", "--enable-dp-attention"]


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", "", "99999", "٣"])
def test_a_number_of_gpus_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="from 1 to 4,096"):
        parse_gpus(text)


def test_experts_are_shared_and_attention_is_whole_on_each_rank():
    rank = rank_layers(MODEL, Layout(ranks=4))
    assert rank.attention_bytes == MODEL.attention_bytes
    assert rank.expert_bytes(MOE)(1e6) == pytest.approx(MODEL.expert_bytes(MOE)(1e6) / 4)
    # As many rows reach a rank's experts as it has itself: each has a quarter of the choices of four times the rows.
    assert rank.expert_work(MOE)(100) == MODEL.expert_work(MOE)(100)
    assert rank.experts_reached(1) == pytest.approx(MODEL.experts_reached(4) / 4)


def test_tensor_parallel_ranks_have_a_part_of_every_matrix():
    rank = rank_layers(MODEL, Layout(ranks=4, tensor=True))
    assert rank.attention_bytes == MODEL.attention_bytes / 4
    assert rank.experts_reached(1) == MODEL.experts_reached(1)
    assert rank.kv_layer_bytes == MODEL.kv_layer_bytes / 4


def test_a_batch_is_split_evenly_and_keeps_its_mix():
    mixed = Workload(requests=[Request(100, 10), Request(200, 20)] * 50, count=100)
    mine = share_of(mixed, Layout(instances=2, ranks=2))
    assert mine.count == len(mine.requests) == 25
    assert {one.prompt for one in mine.requests} <= {100, 200}
    assert share_of(parse_workload("8:8x10"), Layout(instances=4)).count == 3
    assert share_of(parse_workload("8:8x10"), Layout(ranks=5, tensor=True)).count == 10


def test_a_row_goes_once_to_each_rank_that_has_one_of_its_experts():
    assert exchange_row_bytes(MODEL, ONE_GPU) == 0
    one_choice = replace(MODEL, top_k=1)
    assert exchange_row_bytes(one_choice, Layout(ranks=2)) == pytest.approx((2048 + 8 + 4096) / 2)
    assert exchange_row_bytes(MODEL, Layout(ranks=8)) < 7 * (2048 + 64 + 4096)


def outcome_of(seconds: dict[Layout, float]):
    """A search that finds one plan of so many seconds for each layout, and none for others."""

    def search_one(layout: Layout) -> Outcome:
        taken = seconds.get(layout)
        memory = MemoryMap(phases={}, room=Room(device=1))
        found = (
            [] if taken is None else [Planned(candidate=CANDIDATE, memory=memory, prediction=Prediction(seconds=taken))]
        )
        return Outcome(ranked=found, not_implemented=[], lacks="" if found else "too large", tried=1)

    return search_layouts(layouts(8, MODEL), search_one)


def test_the_fastest_layout_that_is_built_is_chosen_and_faster_ones_are_named():
    found = outcome_of({Layout(instances=2, ranks=4): 10.0, Layout(ranks=8): 12.0, Layout(ranks=8, tensor=True): 5.0})
    assert [one.layout.ranks for one in found.ranked] == [4, 8]
    assert [one.layout.tensor for one in found.not_implemented] == [True]
    assert [why for _, best, why in found.layouts if best is None] == ["too large"] * 4
    assert found.tried == 7


def test_of_equally_fast_layouts_the_one_with_the_fewest_ranks_is_chosen():
    found = outcome_of({Layout(instances=8): 10.01, Layout(instances=4, ranks=2): 10.0})
    assert found.ranked[0].layout.ranks == 1


def test_what_is_not_built_is_never_chosen_though_nothing_else_fits():
    found = outcome_of({Layout(ranks=8, tensor=True): 5.0})
    assert (found.ranked, found.lacks) == ([], "too large")
    assert found.not_implemented[0].layout.tensor
