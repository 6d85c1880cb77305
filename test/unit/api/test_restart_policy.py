"""An engine that dies of its lines is started again; one that cannot work is given up."""

from __future__ import annotations

from sgl_batch.api.restart_policy import RestartPolicy, SessionEnd


def end(message: str = "no memory", *, lived_s: float = 0.0, busy: bool = False, num_answered: int = 0) -> SessionEnd:
    return SessionEnd(message=message, lived_s=lived_s, busy=busy, num_answered=num_answered)


def test_the_same_failure_three_times_in_the_first_minute_is_the_last():
    policy = RestartPolicy()
    assert policy.delay_after(end()) == 1.0
    assert policy.delay_after(end(lived_s=59.0)) == 2.0
    assert policy.delay_after(end()) is None


def test_messages_that_differ_only_in_numbers_are_the_same():
    policy = RestartPolicy()
    messages = [f"the scheduler died: SIGKILL; it had taken {had} GiB" for had in ("1.50", "1.62", "9")]
    assert [policy.delay_after(end(one)) for one in messages] == [1.0, 2.0, None]


def test_another_message_resets_the_count():
    policy = RestartPolicy()
    delays = [policy.delay_after(end(message)) for message in ("a", "a", "b", "b", "b")]
    assert delays[:4] == [1.0, 2.0, 4.0, 8.0]
    assert delays[4] is None


def test_an_engine_that_ran_for_a_minute_resets_the_count():
    policy = RestartPolicy()
    delays = [policy.delay_after(end(lived_s=lived_s)) for lived_s in (0.0, 0.0, 60.0, 0.0, 0.0)]
    assert delays == [1.0, 2.0, 1.0, 2.0, None]


def test_deaths_after_answered_lines_never_stop_the_restarts_and_wait_little():
    policy = RestartPolicy()
    assert {policy.delay_after(end(busy=True, num_answered=1)) for _ in range(100)} == {1.0}


def test_an_engine_that_dies_of_every_line_is_given_up_after_many_starts():
    policy = RestartPolicy()
    delays = [policy.delay_after(end(busy=True)) for _ in range(12)]
    assert None not in delays[:11]
    assert delays[11] is None


def test_delays_grow_to_a_minute_and_no_further():
    policy = RestartPolicy()
    delays = [policy.delay_after(end(word)) for word in "abcdefghi"]
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]
