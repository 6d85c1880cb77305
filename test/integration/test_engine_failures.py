"""An engine process that fails does not end the program: the engine raises the last error of that process."""

from __future__ import annotations

import asyncio
import multiprocessing
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from sgl_batch import Engine
from sgl_batch.errors import EngineError

from . import failing_callbacks
from .background import in_background
from .conftest import FAMILIES

pytestmark = pytest.mark.engine

FAULT = rf"ZeroDivisionError: {failing_callbacks.FAULT} \(sgl_batch/[a-z_/]+\.py:\d+\)"
TRACEBACK = r"; its traceback is in (\S+)$"
GREEDY = {"temperature": 0, "max_new_tokens": 2}


@pytest.fixture
def start(
    model_path: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Engine]:
    """Return a function that starts an engine with a failing callback. Tracebacks go to a directory of the test."""
    # The name is short because paths of sockets must be.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("failures")))
    monkeypatch.syspath_prepend(Path(__file__).parent)

    def begin(callback: str) -> Engine:
        on_yield = f"failing_callbacks:{callback}"
        return Engine(model_path=model_path(FAMILIES[0]), dtype="float32", max_total_tokens=4096, on_yield=on_yield)

    return begin


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


def test_a_start_that_fails_raises_the_process_s_own_error_and_names_its_traceback(
    start: Callable[[str], Engine],
) -> None:
    with pytest.raises(EngineError, match=f"^the engine did not start: the scheduler failed: {FAULT}{TRACEBACK}") as e:
        start("raise_at_start")
    traceback = Path(re.search(TRACEBACK, str(e.value))[1]).read_text()
    assert traceback.startswith("Traceback (most recent call last):")
    assert "failing_callbacks.py" in traceback
    assert e.value.__cause__ is None, "the traceback of the process that waits explains nothing"
    killed = r"^the engine did not start: the scheduler died: SIGKILL .*; it had taken \d+\.\d+ [MG]iB of memory"
    with pytest.raises(EngineError, match=killed):
        start("be_killed_at_start")


def test_a_detokenizer_that_ends_while_the_model_is_loaded_ends_the_start(start: Callable[[str], Engine]) -> None:
    before = set(multiprocessing.active_children())

    def kill_second(over: Any) -> None:
        while not over.is_set():
            if len(new := set(multiprocessing.active_children()) - before) == 2:
                max(new, key=lambda one: int(one.name.rpartition("-")[2])).kill()
                return

    message = "^the engine did not start: the detokenizer died: SIGKILL"
    with in_background(kill_second), pytest.raises(EngineError, match=message):
        start("fail")


def test_requests_and_controls_of_an_engine_whose_scheduler_fails_raise_its_error(
    start: Callable[[str], Engine],
) -> None:
    engine = start("fail")
    try:
        assert len(engine.generate(input_ids=[1, 2, 3], sampling_params=GREEDY)["output_ids"]) == 2
        message = f"^the scheduler failed: {FAULT}{TRACEBACK}"
        with pytest.raises(EngineError, match=message):
            engine.generate(
                input_ids=[[1, 2], [1] * failing_callbacks.RAISES_AT], sampling_params={**GREEDY, "max_new_tokens": 900}
            )
        with pytest.raises(EngineError, match=message):
            engine.generate(input_ids=[1, 2, 3], sampling_params=GREEDY)
        with pytest.raises(EngineError, match=message):
            engine.batch_stats()
    finally:
        engine.shutdown()


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
def test_a_stream_raises_when_a_process_is_killed(victim: str, start: Callable[[str], Engine]) -> None:
    engine = start("fail")
    prompt = [1] * failing_callbacks.RAISES_AT * 2
    parameters = {**GREEDY, "max_new_tokens": 900, "ignore_eos": True}

    async def consume() -> None:
        stream = await engine.async_generate(input_ids=prompt, sampling_params=parameters, stream=True)
        async for _ in stream:
            engine.own_processes[victim == "detokenizer"].kill()

    try:
        with pytest.raises(EngineError, match=f"^the {victim} died: SIGKILL"):
            engine.loop.run_until_complete(asyncio.wait_for(consume(), 60))
    finally:
        engine.shutdown()
