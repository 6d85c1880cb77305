"""An engine's own event loop is closed with its tasks; that of its user is left alone."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator

import pytest

from sgl_batch.engine.own_loop import ClosedLoop, OwnLoop
from sgl_batch.errors import EngineError


async def wait_and_fail() -> None:
    try:
        await asyncio.sleep(600)
    finally:
        raise ValueError("at its end")


def test_a_loop_s_tasks_end_and_its_descriptors_are_closed(caplog: pytest.LogCaptureFixture) -> None:
    # uvloop's first loop, where an earlier test has made uvloop the policy, opens a pipe that the process keeps.
    asyncio.new_event_loop().close()
    before = os.listdir("/proc/self/fd")
    own, loop = OwnLoop(), asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    tasks = [loop.create_task(asyncio.sleep(600)), loop.create_task(wait_and_fail())]
    loop.run_until_complete(asyncio.sleep(0))
    own.end_tasks(loop)
    assert all(task.done() for task in tasks)
    for _ in range(2):
        own.close(loop)
    assert os.listdir("/proc/self/fd") == before
    del tasks
    gc.collect()
    assert not caplog.records, "asyncio reports tasks that were lost"
    with pytest.raises(RuntimeError, match="no current event loop"):
        asyncio.get_event_loop_policy().get_event_loop()


def test_what_stands_for_a_closed_loop_makes_no_call() -> None:
    own, loop = OwnLoop(), asyncio.new_event_loop()
    closed = own.close(loop)
    assert isinstance(closed, ClosedLoop)
    with pytest.raises(EngineError, match="has been shut down: make another one"):
        closed.run_until_complete(wait_and_fail())
    own.end_tasks(closed)
    assert own.close(closed) is closed


def test_a_loop_that_runs_when_the_engine_is_made_is_left_alone() -> None:
    loop = asyncio.new_event_loop()

    async def make() -> OwnLoop:
        return OwnLoop()

    own, task = loop.run_until_complete(make()), loop.create_task(asyncio.sleep(600))
    own.end_tasks(loop)
    own.close(loop)
    assert not loop.is_closed()
    assert not task.cancelling()
    task.cancel()
    loop.run_until_complete(asyncio.wait([task]))
    loop.close()


def test_a_generator_that_was_not_read_to_its_end_is_closed_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    own, loop = OwnLoop(), asyncio.new_event_loop()
    ended = []

    async def answers() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        finally:
            ended.append(True)

    async def first(generator: AsyncIterator[int]) -> int:
        return await anext(generator)

    kept, dropped = answers(), answers()
    assert loop.run_until_complete(first(kept)) == loop.run_until_complete(first(dropped)) == 1
    del dropped
    gc.collect()
    own.end_tasks(loop)
    own.close(loop)
    assert ended == [True, True]
    gc.collect()
    assert not caplog.records
