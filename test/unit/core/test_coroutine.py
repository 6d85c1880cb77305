"""The table of transitions: its events move a sequence, and all others are refused."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from sequence_builders import sequence

from sgl_batch.core.coroutine import TERMINAL, TRANSITIONS, Event, Transition, advance
from sgl_batch.core.sequence import Status

REFUSED = [pair for pair in product(Status, Event) if pair not in TRANSITIONS]


@pytest.mark.parametrize(("status", "event"), list(TRANSITIONS))
def test_an_event_in_the_table_moves_the_sequence_and_is_recorded(status, event):
    changed = sequence(3, status=status)
    change = advance(changed, event, "because")
    after = TRANSITIONS[status, event]
    assert change == Transition(sequence_id="s3", before=status, after=after, event=event, why="because")
    assert changed.status is after


@pytest.mark.parametrize(("status", "event"), REFUSED)
def test_an_event_that_is_not_in_the_table_is_refused_and_changes_nothing(status, event):
    unchanged = sequence(3, status=status)
    with pytest.raises(AssertionError, match=f"s3: no transition for {event.name} in {status.name}"):
        advance(unchanged, event, "")
    assert unchanged.status is status


def test_the_two_tests_above_cover_every_pair():
    assert len(REFUSED) + len(TRANSITIONS) == len(Status) * len(Event)


def test_the_transitions_of_a_whole_life_join_end_to_end():
    whole = sequence()
    life = (Event.COMBINE_PREFILL, Event.YIELD_PREFILLED, Event.COMBINE_DECODE, Event.FINISH)
    records = [advance(whole, event, "") for event in life]
    path = [Status.QUEUED, Status.PREFILLING, Status.READY, Status.RUNNING, Status.FINISHED]
    assert [(record.before, record.after) for record in records] == list(pairwise(path))


def test_nothing_leaves_a_terminal_status():
    assert [pair for pair in TRANSITIONS if pair[0] in TERMINAL] == []


def test_every_status_that_is_not_terminal_can_be_aborted():
    assert {status for status, event in TRANSITIONS if event is Event.ABORT} == set(Status) - TERMINAL


def test_every_status_can_be_reached_and_left_unless_terminal():
    reached, frontier = set(), {Status.QUEUED}
    while frontier:
        reached |= frontier
        frontier = {after for (before, _), after in TRANSITIONS.items() if before in frontier} - reached
    assert reached == set(Status)
    assert {status for status, _ in TRANSITIONS} == set(Status) - TERMINAL
