"""yield_ and combine change states by the table, in the order given."""

from __future__ import annotations

import pytest
from sequence_builders import sequence

from sgl_batch.core.coroutine import Event
from sgl_batch.core.primitives import combine, yield_
from sgl_batch.core.sequence import Status


@pytest.mark.parametrize(("finished", "after"), [(False, Status.READY), (True, Status.FINISHED)])
def test_a_prefilled_sequence_yields_ready_or_finished(finished, after):
    prefilled = sequence(status=Status.PREFILLING)
    change = yield_(prefilled, finished=finished, why="its prompt is computed")
    assert (prefilled.status, change.after, change.why) == (after, after, "its prompt is computed")


def test_only_a_sequence_in_prefill_yields():
    with pytest.raises(AssertionError, match="no transition for YIELD_PREFILLED in RUNNING"):
        yield_(sequence(status=Status.RUNNING), finished=False, why="")


@pytest.mark.parametrize(
    ("event", "before", "after"),
    [
        (Event.COMBINE_PREFILL, Status.QUEUED, Status.PREFILLING),
        (Event.COMBINE_DECODE, Status.READY, Status.RUNNING),
    ],
)
def test_combine_moves_every_sequence_in_the_order_given(event, before, after):
    group = [sequence(arrival, status=before) for arrival in (4, 1, 7)]
    changes = combine(group, event, "a group of 3")
    assert [change.sequence_id for change in changes] == ["s4", "s1", "s7"]
    assert {(change.before, change.after, change.why) for change in changes} == {(before, after, "a group of 3")}
    assert {member.status for member in group} == {after}


@pytest.mark.parametrize("event", [one for one in Event if one not in (Event.COMBINE_PREFILL, Event.COMBINE_DECODE)])
def test_an_event_that_combines_nothing_is_refused_even_for_no_sequences(event):
    with pytest.raises(AssertionError, match=f"{event.name} combines nothing"):
        combine([], event, "")
