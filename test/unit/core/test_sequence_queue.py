"""The queue keeps the order of arrival, and its views need no copy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_batch.core.sequence import SequenceState
from sgl_batch.core.sequence_queue import SequenceQueue


def sequence(arrival: int, group: str | None = None) -> SequenceState:
    return SequenceState(
        sequence_id=f"s{arrival}", arrival=arrival, prompt_tokens=10, max_new_tokens=5, prompt_group=group
    )


def queue_of(*groups: str | None) -> SequenceQueue:
    queue = SequenceQueue()
    for arrival, group in enumerate(groups):
        queue.add(sequence(arrival, group))
    return queue


def arrivals(sequences) -> list[int]:
    return [one.arrival for one in sequences]


def test_a_view_shows_the_present_queue():
    queue = queue_of(None, "g", None)
    view = queue.view()
    assert (len(view), arrivals(view)) == (3, [0, 1, 2])
    queue.remove("s1")
    queue.add(sequence(7))
    assert (len(view), arrivals(view)) == (3, [0, 2, 7])


def test_a_view_leaves_out_whole_prompt_groups():
    queue = queue_of(None, "g", "h", "g", None)
    assert arrivals(queue.view(without={"g"})) == [0, 2, 4]
    assert arrivals(queue.view(without={"g", "h", "not queued"})) == [0, 4]


@pytest.mark.parametrize(
    "cut", [slice(2), slice(1, 3), slice(None), slice(9, 12), slice(-2, None), slice(None, None, -1)]
)
def test_a_view_is_sliced_like_a_list(cut):
    view = queue_of(None, "g", None, "h").view(without={"g"})
    assert view[cut] == list(view)[cut]


def test_a_view_is_indexed_by_position():
    view = queue_of(None, "g", None).view(without={"g"})
    assert arrivals([view[0], view[1], view[-1]]) == [0, 2, 2]
    with pytest.raises(IndexError):
        view[2]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([None, "g", "h"]), st.booleans()), max_size=30),
    st.sets(st.sampled_from(["g", "h", "i"])),
)
def test_a_views_length_is_the_number_of_its_sequences(changes, without):
    queue, there = SequenceQueue(), []
    for arrival, (group, leaves) in enumerate(changes):
        if leaves and there:
            queue.remove(there.pop(len(there) // 2))
        queue.add(sequence(arrival, group))
        there.append(f"s{arrival}")
    view = queue.view(without=without)
    assert len(view) == len(list(view))
    assert len(queue) == len(there)
    assert [queue[name].sequence_id for name in there] == there
