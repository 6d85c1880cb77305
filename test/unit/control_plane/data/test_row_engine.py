"""Rows are answered whatever happens to the engine: it starts with the first rows, and anew where it dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from scripted_engine import ScriptedEngine

from sgl_batch.control_plane.data.engine_thread import EngineThread
from sgl_batch.control_plane.data.row_engine import RowEngine
from sgl_batch.control_plane.data.row_requests import RowAnswer, RowRequest
from sgl_batch.errors import EngineError


class Engines:
    """Makes engines, and counts them. `prepare` changes each new one."""

    def __init__(self, prepare: Callable[[ScriptedEngine], None] = lambda _: None) -> None:
        self.made: list[ScriptedEngine] = []
        self._prepare = prepare
        self.rows = RowEngine(lambda: EngineThread(self._make))

    def _make(self) -> ScriptedEngine:
        engine = ScriptedEngine()
        self._prepare(engine)
        self.made.append(engine)
        return engine

    def texts(self, *batches: list[str]) -> list[list[str]]:
        """Return each row's text, or its error, for batches that are asked at once."""

        async def run() -> list[list[RowAnswer]]:
            asked = [[RowRequest(prompt=prompt) for prompt in batch] for batch in batches]
            return await asyncio.gather(*(self.rows.answers(requests) for requests in asked))

        return [[answer.text or answer.error for answer in answers] for answers in asyncio.run(run())]


@pytest.fixture
def engines() -> Iterator[Engines]:
    made = Engines()
    yield made
    made.rows.close()


def test_no_engine_starts_before_rows_come_and_batches_share_one(engines: Engines) -> None:
    assert engines.texts([]) == [[]]
    assert engines.made == []
    assert engines.texts(["a"], ["b", "c"]) == [["a"], ["b", "c"]]
    assert len(engines.made) == 1


def test_rows_in_an_engine_that_dies_are_asked_again(engines: Engines) -> None:
    first = True

    def die_once(engine: ScriptedEngine) -> None:
        nonlocal first
        engine.is_dead, first = first, False

    mortal = Engines(die_once)
    assert mortal.texts(["a", "b"], ["c"]) == [["a", "b"], ["c"]]
    assert [engine.is_shut_down for engine in mortal.made] == [True, False]
    mortal.rows.close()


def test_a_row_that_ends_every_engine_gets_that_as_its_error_and_the_others_are_answered(engines: Engines) -> None:
    (texts, others) = engines.texts(["a", "kill", "b"], ["c"])
    assert (texts[0], texts[2], others) == ("a", "b", ["c"])
    assert texts[1].startswith("the engine died when it answered this row alone: a process has ended")


def test_an_engine_that_dies_again_and_again_ends_the_run() -> None:
    def die(engine: ScriptedEngine) -> None:
        engine.is_dead = True

    mortal = Engines(die)
    with pytest.raises(EngineError, match="has died 6 times without an answer: a process has ended"):
        mortal.texts(["a", "b", "c", "d", "e", "f", "g"])
    mortal.rows.close()
