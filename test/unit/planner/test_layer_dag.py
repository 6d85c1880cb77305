"""The graph of a layer: what waits for what, and what a layer takes in the steady state."""

from __future__ import annotations

import pytest

from sgl_batch.planner.critical_path import Node, critical_path
from sgl_batch.planner.layer_dag import (
    ATTENTION,
    EXCHANGE,
    EXPERTS,
    FETCH,
    RESTORE,
    LayerWork,
    SubBatch,
    Work,
    build,
    layer_time,
)


def sub_batch(attention: float, **others: float) -> SubBatch:
    return SubBatch(attention=Work(seconds=attention), **{name: Work(seconds=s) for name, s in others.items()})


def test_the_longest_chain_is_found():
    graph = [
        Node(kind="a", seconds=1),
        Node(kind="b", seconds=5),
        Node(kind="c", seconds=2, after=(0,)),
        Node(kind="d", seconds=1, after=(1, 2)),
    ]
    path = critical_path(graph)
    assert (path.seconds, path.nodes) == (6, (1, 3))
    assert critical_path([]).seconds == 0


def test_a_graph_out_of_order_is_a_fault_of_the_program():
    with pytest.raises(AssertionError, match="comes after a later one"):
        critical_path([Node(kind="a", seconds=1, after=(1,)), Node(kind="b", seconds=1)])


def test_without_copies_a_layer_is_the_sum_of_its_work():
    time = layer_time(LayerWork(sub_batches=[sub_batch(2), sub_batch(3)], experts=Work(seconds=4)))
    assert (time.seconds, time.waits_s, time.bottleneck) == (9, 0, ATTENTION)


def test_a_copy_that_takes_no_time_changes_nothing():
    plain, copied = (
        LayerWork(sub_batches=[sub_batch(2), sub_batch(3, **others)], experts=Work(seconds=4))
        for others in ({}, {"restore": 0.0})
    )
    assert layer_time(plain).seconds == layer_time(copied).seconds


def test_experts_that_are_fetched_once_they_are_chosen_hide_behind_nothing():
    work = {"sub_batches": [sub_batch(2), sub_batch(3)], "experts": Work(seconds=4), "fetch": Work(seconds=5)}
    assert layer_time(LayerWork(**work)).seconds == pytest.approx(9)
    assert layer_time(LayerWork(**work, fetches_ahead=False)).seconds == pytest.approx(14)
    of_sub_batches = {"sub_batches": [sub_batch(2, experts=4)], "fetch": Work(seconds=5)}
    assert layer_time(LayerWork(**of_sub_batches, fetches_ahead=False)).seconds == pytest.approx(11)


def test_restores_hide_behind_the_attention_of_the_sub_batch_before():
    hidden = LayerWork(sub_batches=[sub_batch(2, restore=1)] * 4, experts=Work(seconds=4))
    assert layer_time(hidden).seconds == pytest.approx(12)


def test_restores_that_take_longer_than_all_computation_are_the_bottleneck():
    time = layer_time(LayerWork(sub_batches=[sub_batch(1, restore=5)] * 4, experts=Work(seconds=2)))
    assert time.bottleneck == RESTORE
    assert time.seconds > 19


def test_two_buffers_of_kv_let_no_third_restore_begin():
    graph = build(LayerWork(sub_batches=[sub_batch(1, restore=1)] * 3, experts=Work(seconds=1)), 1)
    restores = [index for index, node in enumerate(graph) if node.kind == RESTORE]
    first_attention = next(index for index, node in enumerate(graph) if node.kind == ATTENTION)
    assert first_attention in graph[restores[2]].after


def test_experts_wait_for_their_weights():
    time = layer_time(LayerWork(sub_batches=[sub_batch(1)], experts=Work(seconds=1), fetch=Work(seconds=9)))
    assert (time.seconds, time.bottleneck) == (9, FETCH)
    assert time.waits_s == pytest.approx(7)


def test_weights_of_a_layer_wait_for_a_free_buffer():
    graph = build(LayerWork(sub_batches=[sub_batch(1)], experts=Work(seconds=1), fetch=Work(seconds=1)), 3)
    fetches = [node for node in graph if node.kind == FETCH]
    experts = [index for index, node in enumerate(graph) if node.kind == EXPERTS]
    assert experts[0] in fetches[2].after


def test_on_a_cpu_copies_take_cores_from_computation():
    work = LayerWork(sub_batches=[sub_batch(2, restore=2)] * 4, experts=Work(seconds=2), copy_cores=0.5)
    assert layer_time(work).seconds == pytest.approx(4 * 2 + 2 + 4 * 2 * 0.5)


def test_a_fused_sub_batch_has_its_own_expert_call():
    fused = LayerWork(sub_batches=[sub_batch(1, experts=2)] * 3)
    assert layer_time(fused).seconds == 9
    assert layer_time(fused).bottleneck == EXPERTS


def test_kv_that_leaves_slowly_holds_up_the_sub_batches_behind():
    work = LayerWork(sub_batches=[sub_batch(1, offload=5)] * 4, experts=Work(seconds=1))
    assert layer_time(work).seconds == pytest.approx(20)


def test_other_work_hides_waits_until_the_copies_take_longest():
    waiting = layer_time(LayerWork(sub_batches=[sub_batch(2, restore=3)] * 2, experts=Work(seconds=4)))
    assert waiting.seconds - waiting.hideable_s == pytest.approx(8)
    copying = layer_time(LayerWork(sub_batches=[sub_batch(1, restore=5)] * 2, experts=Work(seconds=1)))
    assert copying.seconds - copying.hideable_s == pytest.approx(10)


def test_on_a_cpu_other_work_hides_nothing():
    work = LayerWork(sub_batches=[sub_batch(2, restore=3)] * 2, experts=Work(seconds=4), copy_cores=0.5)
    assert layer_time(work).hideable_s == 0


def test_one_link_brings_kv_and_weights_to_a_gpu():
    both = LayerWork(sub_batches=[sub_batch(1, restore=4)], experts=Work(seconds=1), fetch=Work(seconds=5))
    assert layer_time(both).seconds == pytest.approx(9)


def test_an_exchange_is_waited_for():
    time = layer_time(LayerWork(sub_batches=[sub_batch(1)], experts=Work(seconds=2), exchange=Work(seconds=4)))
    assert (time.seconds, time.waits_s, time.bottleneck) == (7, 0, EXCHANGE)
