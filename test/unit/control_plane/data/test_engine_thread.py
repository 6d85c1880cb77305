"""An engine in its own thread answers other threads' loops, turns a row's fault into its error, and ends when told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from sgl_batch.control_plane.data.engine_thread import EngineThread
from sgl_batch.control_plane.data.row_requests import RowAnswer, RowRequest
from sgl_batch.errors import ConfigError, EngineError


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def thread(engine: ScriptedEngine) -> Iterator[EngineThread]:
    made = EngineThread(lambda: engine)
    made.start()
    yield made
    made.close()


def ask(thread: EngineThread, *prompts: str | RowRequest) -> list[RowAnswer | None]:
    async def run() -> list[RowAnswer | None]:
        await thread.ready()
        return await thread.answers([p if isinstance(p, RowRequest) else RowRequest(prompt=p) for p in prompts])

    return asyncio.run(run())


def test_answers_come_in_order_and_a_second_loop_may_ask(thread: EngineThread) -> None:
    answers = ask(thread, "one two", "three")
    assert answers == [
        RowAnswer(text="one two", tokens=[0, 1], num_input_tokens=7),
        RowAnswer(text="three", tokens=[0], num_input_tokens=7),
    ]
    assert ask(thread, "four")[0] == RowAnswer(text="four", tokens=[0], num_input_tokens=7)
    assert thread.occupancy.answered == 3
    assert (thread.occupancy.now, thread.occupancy.most) == (0, 2)


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("refuse", "the prompt is too long"),
        ("busy", "no room"),
        ("ended", "the engine ended the request"),
        ("odd", "ZeroDivisionError"),
        ("abort", "the request was aborted: by hand"),
    ],
)
def test_a_row_that_fails_has_its_reason_in_one_line_and_the_others_are_answered(
    thread: EngineThread, prompt: str, error: str
) -> None:
    answers = ask(thread, "one", prompt)
    assert answers[0] == RowAnswer(text="one", tokens=[0], num_input_tokens=7)
    assert answers[1] == RowAnswer(error=error)


def test_a_request_that_the_engine_ends_by_itself_is_tried_once_more(
    engine: ScriptedEngine, thread: EngineThread
) -> None:
    assert ask(thread, "ended once") == [RowAnswer(text="ended once", tokens=[0, 1], num_input_tokens=7)]
    assert len(engine.asked) == 2


def test_rows_that_the_engine_s_death_leaves_open_have_no_answer(thread: EngineThread) -> None:
    assert ask(thread, "one", "kill") == [None, None]
    assert str(thread.death) == "a process has ended"


def test_messages_go_through_the_model_s_chat_template(engine: ScriptedEngine) -> None:
    class Tokenizer:
        chat_template = "{{ messages }}"

        def apply_chat_template(self, messages: list[Any], **options: Any) -> list[int]:
            assert options == {"tokenize": True, "return_dict": False, "add_generation_prompt": True, "think": False}
            return [len(messages), 9]

    engine.tokenizer_manager.tokenizer = Tokenizer()
    thread = EngineThread(lambda: engine, {"think": False})
    thread.start()
    ask(thread, RowRequest(messages=[{"role": "user", "content": "hello"}]))
    thread.close()
    assert engine.asked[0]["input_ids"] == [1, 9]


def test_messages_for_a_model_without_a_chat_template_are_that_row_s_error(thread: EngineThread) -> None:
    (answer,) = ask(thread, RowRequest(messages=[{"role": "user", "content": "hello"}]))
    assert answer is not None
    assert "no chat template" in answer.error


def test_an_engine_that_does_not_start_raises_where_it_is_awaited_and_closes() -> None:
    def fail() -> ScriptedEngine:
        raise ConfigError("no such model")

    thread = EngineThread(fail)
    thread.start()
    with pytest.raises(ConfigError, match="no such model"):
        asyncio.run(thread.ready())
    thread.close()


def test_closing_ends_the_engine_and_does_nothing_the_second_time(engine: ScriptedEngine, thread: EngineThread) -> None:
    ask(thread, "one")
    thread.close()
    thread.close()
    assert engine.is_shut_down


def test_an_engine_that_is_empty_reports_how_full_it_was_each_time_that_twice_the_rows_are_answered(
    thread: EngineThread, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(4):
            ask(thread, "one", "two")
    reports = [record.getMessage() for record in caplog.records if "rows:" in record.getMessage()]
    assert [report.split(" answered")[0] for report in reports] == ["rows: 2", "rows: 4", "rows: 8"]
    assert reports[0].endswith(
        "at most 2 in the engine at once; 3.0 decoded together on average; threads: 2, on CPUs: 1"
    )


def test_a_thread_that_never_started_closes() -> None:
    EngineThread(ScriptedEngine).close()


def test_the_end_of_an_engine_is_an_error_of_the_engine() -> None:
    engine = ScriptedEngine()
    engine.is_dead = True
    thread = EngineThread(lambda: engine)
    thread.start()
    ask(thread, "one")
    thread.close()
    assert isinstance(thread.death, EngineError)
