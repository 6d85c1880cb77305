"""What a step costs, without an engine: a stand-in for the parts of SGLang's scheduler that are looked at."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace

from scheduler_stand_ins import request, scheduler_stand_in

from sgl_batch.config import BatchConfig
from sgl_batch.core.plan import make_plan
from sgl_batch.managers.boundary_executor import BoundaryExecutor
from sgl_batch.managers.trace import TraceWriter
from sgl_batch.model_executor.counters import Counters


def executor_with_queue(length: int) -> BoundaryExecutor:
    plan = make_plan(BatchConfig(), page_size=64, max_running=512)
    executor = BoundaryExecutor(scheduler_stand_in(), plan, Counters(), TraceWriter(None))
    for number in range(length):
        executor.enqueue(request(number))
    return executor


def bytes_of_a_decode_step(queue_length: int) -> int:
    """The most memory that one step between two boundaries takes in passing."""
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
