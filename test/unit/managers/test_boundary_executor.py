"""What a step costs, and when decode continues without results, over stand-ins for SGLang's scheduler."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace

import pytest
from scheduler_stand_ins import request, scheduler_stand_in

from sgl_batch.config import BatchConfig
from sgl_batch.core.actions import Abort, Action, EndPartition, Migrate, Partition
from sgl_batch.core.kv_policy import DeviceOnly
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.core.sequence import Status
from sgl_batch.kv_offload.device_kv import DeviceKV
from sgl_batch.managers.boundary_executor import BoundaryExecutor
from sgl_batch.managers.trace import TraceWriter
from sgl_batch.metrics.counters import Counters


def executor_with_queue(length: int) -> BoundaryExecutor:
    in_force = PlanInForce(BatchConfig())
    in_force.fit(page_size=64, max_running=512, can_reenter=True)
    scheduler, counters = scheduler_stand_in(), Counters()
    kv = DeviceKV(scheduler, counters)
    executor = BoundaryExecutor(scheduler, in_force, counters, TraceWriter(None), kv, DeviceOnly())
    for number in range(length):
        executor.enqueue(request(number))
    return executor


def bytes_of_a_decode_step(queue_length: int) -> int:
    """The peak of memory that one step between two boundaries takes."""
    executor = executor_with_queue(queue_length)
    running = SimpleNamespace(reqs=[None] * 256, prepare_for_decode=lambda: None)
    executor.next_batch(running)
    tracemalloc.start()
    try:
        executor.next_batch(running)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_step_between_boundaries_does_not_copy_the_queue():
    assert bytes_of_a_decode_step(10_000) < bytes_of_a_decode_step(10) + 8_000, "a list of the queue takes 80,000 bytes"


def test_decode_continues_without_results_up_to_the_boundary():
    executor = executor_with_queue(0)
    running = SimpleNamespace(reqs=[None] * 3, prepare_for_decode=lambda: None)
    executor.next_batch(running)
    steps = 1
    while executor.decode_continues(running):
        executor.decode_step(running)
        steps += 1
    assert steps == executor.plan.boundary_tokens


def test_a_requested_boundary_comes_with_the_next_step_and_once():
    executor = executor_with_queue(0)
    running = SimpleNamespace(reqs=[None] * 3, prepare_for_decode=lambda: None)
    executor.next_batch(running)
    boundaries = executor._counters.counts["boundaries"]
    executor.request_boundary()
    assert not executor.decode_continues(running)
    for _ in range(3):
        executor.next_batch(running)
    assert executor._counters.counts["boundaries"] == boundaries + 1


def test_decode_does_not_continue_without_runners_or_while_choices_await_prefill():
    executor = executor_with_queue(0)
    running = SimpleNamespace(reqs=[None] * 3, prepare_for_decode=lambda: None)
    executor.next_batch(running)
    assert executor.decode_continues(running)
    assert not executor.decode_continues(SimpleNamespace(reqs=[]))
    executor._unbatched.forked.append(request(1))
    assert not executor.decode_continues(running)


def test_sequences_that_ended_during_a_step_have_no_results_of_it():
    executor = executor_with_queue(2)
    ended, going = (executor.table.request_named(name) for name in ("r0", "r1"))
    for name in ("r0", "r1"):
        executor.table[name].status = Status.RUNNING
    going.finished = lambda: False
    ended.finished, ended.finished_reason = lambda: True, SimpleNamespace(to_json=lambda: {"type": "stop"})
    mode = SimpleNamespace(is_extend=lambda: False)
    executor.results.process(SimpleNamespace(reqs=[ended, going], forward_mode=mode), [ended, going])
    # A new request takes its id before the step ends that computed one token too many for it.
    executor.enqueue(request(0))
    executor.results.process(SimpleNamespace(reqs=[ended, going], forward_mode=mode), [going])
    assert executor.table["r0"].status is Status.QUEUED


class Refusable(SimpleNamespace):
    """A request as SGLang refuses it."""

    def set_finish_with_abort(self, why: str) -> None:
        self.to_finish, self.origin_input_ids = why, [0]


def test_a_sequence_that_can_never_fit_is_queued_as_one_token_and_its_error_has_the_numbers():
    executor = executor_with_queue(1)
    too_long = Refusable(**vars(request(1, max_new_tokens=10**6)))
    executor.enqueue(too_long)
    assert too_long.to_finish.startswith("the prompt has 100 tokens and up to 1000000 are to be generated")
    refused = executor.table["r1"]
    assert (refused.prompt_tokens, refused.max_new_tokens, refused.status) == (1, 1, Status.QUEUED)
    assert executor.table["r0"].prompt_tokens == 100
    assert executor._unbatched.queued.tokens == 101


def test_a_running_sequence_is_aborted_with_its_next_step_for_the_first_reason():
    executor = executor_with_queue(1)
    running, sequence = executor.table.request_named("r0"), executor.table["r0"]
    sequence.status, running.finished = Status.RUNNING, lambda: False
    executor._do(Abort(sequences=(sequence,), why="its time is over"), None, 0.0)
    executor._do(Abort(sequences=(sequence,), why="another reason"), None, 0.0)
    assert running.to_finish.to_json()["message"] == "its time is over"


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (Partition(sequences=(), ranks=frozenset((0, 1))), "Partition is carried out by all ranks together"),
        (EndPartition(ranks=frozenset((0, 1))), "EndPartition is carried out by all ranks together"),
        (Migrate(sequences=(), source=0, target=1), "Migrate is carried out by all ranks together"),
    ],
)
def test_actions_that_one_rank_does_not_carry_out_are_refused_by_name(action: Action, message: str):
    with pytest.raises(AssertionError, match=message):
        executor_with_queue(0)._do(action, None, 0.0)
