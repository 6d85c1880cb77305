"""The pure decisions of the batch service: windows, priorities, groups of suspects, and moves of a job."""

from __future__ import annotations

import pytest

from sgl_batch.errors import RequestError
from sgl_batch.jobs.batch_service.bisect_suspects import split_suspects
from sgl_batch.jobs.batch_service.fair_share import weight_of, window_s
from sgl_batch.jobs.batch_service.lifecycle import (
    ENDED,
    TRANSITIONS,
    JobStatus,
    TransitionError,
    check_transition,
    time_column,
)
from sgl_batch.jobs.batch_service.line_states import LineStates
from sgl_batch.jobs.job_store.job_rows import JobRow


@pytest.mark.parametrize(("window", "seconds"), [("24h", 86_400), ("30m", 1800), ("7d", 604_800)])
def test_windows_are_minutes_hours_and_days(window, seconds):
    assert window_s(window) == seconds


@pytest.mark.parametrize("window", ["", "24", "h", "0h", "-1h", "1s", "1.5h", "24h ", "24h\n", "٣h", "9999999d"])
def test_other_windows_are_refused(window):
    with pytest.raises(RequestError, match="give minutes, hours or days"):
        window_s(window)


@pytest.mark.parametrize("priority", ["0", "101", "-1", "1.0", "high", "", "٣"])
def test_priorities_are_whole_numbers_from_1_to_100(priority):
    with pytest.raises(RequestError, match="give a whole number from 1 to 100"):
        weight_of({"priority": priority})
    assert (weight_of({"priority": "100"}), weight_of({}), weight_of(None)) == (100, 1, 1)


@pytest.mark.parametrize("number", [0, 1, 2, 16, 17, 33, 2048])
def test_few_suspects_run_alone_and_many_in_halves(number):
    groups = split_suspects(list(range(number)))
    assert [one for group in groups for one in group] == list(range(number))
    assert all(len(group) == 1 for group in groups) if number <= 16 else len(groups) == 2


def test_every_status_can_be_reached_and_left_unless_it_is_an_end():
    reached = {to for following in TRANSITIONS.values() for to in following}
    assert set(TRANSITIONS) == set(JobStatus) == reached | {JobStatus.VALIDATING}
    assert {JobStatus.FAILED, JobStatus.COMPLETED, JobStatus.EXPIRED, JobStatus.CANCELLED} == ENDED
    for status in reached:
        assert time_column(status) in JobRow.__dataclass_fields__


def test_a_move_that_is_not_in_the_table_is_refused():
    check_transition(JobStatus.IN_PROGRESS, JobStatus.CANCELLING)
    for status in ENDED:
        with pytest.raises(TransitionError, match="cannot become"):
            check_transition(status, JobStatus.CANCELLING)


def test_a_line_is_to_do_then_taken_then_done():
    states = LineStates(5, done=[0, 3])
    assert (states.num_done, states.contiguous, states.first_to_do()) == (2, 1, 1)
    states.take(1)
    assert (states.is_to_do(1), states.is_done(1), states.first_to_do()) == (False, False, 2)
    with pytest.raises(AssertionError, match="already taken"):
        states.take(1)
    states.finish(1)
    states.finish(2)
    assert (states.contiguous, states.num_done, states.first_to_do()) == (4, 4, 4)
    with pytest.raises(AssertionError, match="already done"):
        states.finish(2)
