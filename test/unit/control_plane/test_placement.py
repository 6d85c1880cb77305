"""Instances of a node share no core, and what does not fit is refused with numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_batch.control_plane.instances.placement import (
    Needs,
    Node,
    Place,
    choose_place,
    no_room,
    place_first,
)
from sgl_batch.errors import ConfigError


def node(name: str, cores: int, gpus: int = 0, *, draining: bool = False) -> Node:
    return Node(node_id=name, name=name, cores=tuple(range(cores)), gpus=gpus, draining=draining)


def cores_by_node(places: list[Place]) -> dict[str, list[tuple[int, ...]]]:
    found: dict[str, list[tuple[int, ...]]] = {}
    for one in places:
        found.setdefault(one.node_id, []).append(one.cores)
    return found


def test_a_given_number_is_split_evenly_over_the_cores_of_a_node() -> None:
    assert cores_by_node(place_first([node("a", 7)], 3, Needs())) == {"a": [(0, 1), (2, 3), (4, 5, 6)]}


def test_instances_go_to_the_nodes_on_which_each_gets_the_most() -> None:
    places = place_first([node("small", 2), node("large", 8)], 3, Needs())
    assert {name: len(cores) for name, cores in cores_by_node(places).items()} == {"large": 3}
    assert len(cores_by_node(place_first([node("a", 4), node("b", 4)], 2, Needs()))) == 2


def test_auto_is_one_instance_for_each_node_without_gpus() -> None:
    assert cores_by_node(place_first([node("a", 2), node("b", 3)], None, Needs())) == {
        "a": [(0, 1)],
        "b": [(0, 1, 2)],
    }


def test_auto_is_as_many_as_there_are_gpus() -> None:
    places = place_first([node("a", 8, gpus=4)], None, Needs(gpus=2))
    assert [(one.cores, one.gpus) for one in places] == [((0, 1, 2, 3), 2), ((4, 5, 6, 7), 2)]


def test_auto_with_given_cores_is_as_many_as_have_them() -> None:
    assert cores_by_node(place_first([node("a", 5)], None, Needs(cores=2))) == {"a": [(0, 1), (2, 3)]}


def test_a_draining_node_gets_none() -> None:
    assert set(cores_by_node(place_first([node("a", 2, draining=True), node("b", 2)], None, Needs()))) == {"b"}


def test_a_cluster_that_is_too_small_is_refused_with_what_each_node_has() -> None:
    with pytest.raises(
        ConfigError, match=r"--instances 3: each needs 2 cores; a has 4 cores, room for 2; b has 1 cores, "
    ):
        place_first([node("a", 4), node("b", 1)], 3, Needs(cores=2))
    with pytest.raises(ConfigError, match="one instance needs a core and 1 GPU; a has 4 cores and 0 GPUs, room for 0"):
        place_first([node("a", 4)], None, Needs(gpus=1))


def test_a_lost_instance_stays_on_its_node_if_that_lives() -> None:
    nodes = [node("a", 2), node("b", 9)]
    before = Place(node_id="a", node="a", cores=(1,))
    assert choose_place(nodes, [Place(node_id="a", node="a", cores=(0,))], Needs(), before) == before


def test_an_instance_whose_node_is_gone_goes_where_it_gets_the_most_cores() -> None:
    before = Place(node_id="gone", node="gone", cores=(0, 1))
    taken = [Place(node_id="b", node="b", cores=(0, 1, 2))]
    found = choose_place([node("a", 2), node("b", 9)], taken, Needs(), before)
    assert found == Place(node_id="b", node="b", cores=(3, 4, 5))


def test_a_node_that_came_back_under_another_id_is_preferred() -> None:
    back = Node(node_id="new", name="a", cores=(0, 1))
    before = Place(node_id="old", node="a", cores=(0, 1))
    assert choose_place([node("b", 9), back], [], Needs(), before) == Place(node_id="new", node="a", cores=(0, 1))


def test_nothing_is_placed_where_no_node_has_room() -> None:
    taken = [Place(node_id="a", node="a", cores=(0, 1), gpus=1)]
    nodes = [node("a", 2, gpus=1), node("b", 4, draining=True)]
    assert choose_place(nodes, taken, Needs(gpus=1)) is None
    said = no_room(nodes, taken, Needs(gpus=1))
    assert said.endswith("a core and 1 GPU: a (0 of 2 cores free, 0 of 1 GPUs); b (draining)")


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.one_of(st.none(), st.integers(1, 20)),
    st.one_of(st.none(), st.integers(1, 5)),
)
def test_no_two_instances_share_a_core(sizes: list[int], count: int | None, cores: int | None) -> None:
    nodes = [node(f"n{number}", size) for number, size in enumerate(sizes)]
    try:
        places = place_first(nodes, count, Needs(cores=cores))
    except ConfigError:
        room = sum(size // cores if cores else size for size in sizes)
        assert room < (count or 1)
        return
    assert count is None or len(places) == count
    used = [(one.node_id, core) for one in places for core in one.cores]
    assert len(used) == len(set(used))
    assert all(one.cores and (cores is None or len(one.cores) == cores) for one in places)
