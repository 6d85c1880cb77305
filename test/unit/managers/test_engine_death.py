"""Calls that wait for an engine raise when it dies, and calls of a dead engine raise at once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from sgl_batch.errors import EngineError
from sgl_batch.managers.engine_death import EngineDeath
from sgl_batch.managers.tokenizer_manager import BatchSignalHandler, BatchTokenizerManager


def under_way() -> SimpleNamespace:
    return SimpleNamespace(out_list=[], finished=False, event=asyncio.Event())


async def never(asked: object) -> None:
    await asyncio.Event().wait()


def test_calls_and_requests_under_way_end_with_the_first_reason() -> None:
    async def die() -> None:
        death, states = EngineDeath(), {"a": under_way()}
        state = states["a"]
        call = asyncio.ensure_future(death.unless_dead(never, None))
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(death.note, EngineError("the disk is full", code="full"), states, loop)
        death.note(EngineError("another"), states, loop)
        with pytest.raises(EngineError, match=r"^the disk is full$") as raised:
            await call
        assert raised.value.code == "full"
        assert state.event.is_set()
        assert state.finished
        assert [one["meta_info"]["finish_reason"]["type"] for one in state.out_list] == ["abort"]
        assert states == {}
        with pytest.raises(EngineError, match=r"^the disk is full$"):
            await death.unless_dead(never, None)

    asyncio.run(die())


def test_a_cancelled_call_is_cancelled_and_an_answer_is_returned() -> None:
    async def live() -> None:
        death = EngineDeath()
        call = asyncio.ensure_future(death.unless_dead(never, None))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await death.unless_dead(lambda asked: asyncio.sleep(0, asked), 7) == 7

    asyncio.run(live())


def test_nothing_is_raised_where_lines_read_the_error_themselves() -> None:
    async def die() -> None:
        death, states = EngineDeath(), {"a": under_way()}
        death.is_raised = False
        death.note(EngineError("killed"), states, asyncio.get_running_loop())
        await asyncio.sleep(0)
        assert not states["a"].event.is_set()
        death.raise_if_dead()
        assert str(death.error) == "killed"

    asyncio.run(die())


def tokenizer_manager() -> BatchTokenizerManager:
    manager = BatchTokenizerManager.__new__(BatchTokenizerManager)
    manager.death, manager.rid_to_state, manager.event_loop = EngineDeath(), {}, None
    return manager


def test_a_fault_of_the_tokenizer_manager_ends_the_engine_and_not_the_program() -> None:
    manager = tokenizer_manager()  # without the parts that it reads answers with
    asyncio.run(manager.handle_loop())
    assert str(manager.death.error).startswith("the tokenizer manager failed: AttributeError: ")


def test_a_sigquit_of_a_process_ends_the_engine_and_not_the_program() -> None:
    manager = tokenizer_manager()
    BatchSignalHandler(manager).running_phase_sigquit_handler()
    assert "SIGQUIT" in str(manager.death.error)
    with pytest.raises(EngineError, match="SIGQUIT"):
        manager._dispatch_to_scheduler(None)
