"""A dead engine raises, unless it died of a cause that the user can fix: then every line gets that as its error."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from sgl_batch.core.answers import LineResponse
from sgl_batch.core.partial_output import PartialOutput
from sgl_batch.engine.line_answers import LineAnswers
from sgl_batch.errors import EngineError
from sgl_batch.requests.partial_outputs import PartialOutputs


def respond(death: EngineError) -> LineResponse:
    """Return the answer of an engine that is dead already."""
    manager = SimpleNamespace(partial_outputs=PartialOutputs(), rid_to_state={}, check_openai=None)
    answers = LineAnswers(manager, None, lambda: death)
    return asyncio.run(answers.respond("/v1/completions", {}))


@pytest.fixture(autouse=True)
def no_endpoints(monkeypatch):
    """Fail: a dead engine gets no request."""
    monkeypatch.setattr("sgl_batch.engine.line_answers.OpenAIEndpoints", lambda *_: None)


def test_a_dead_engine_raises_at_once():
    with pytest.raises(EngineError, match="rank 1 died"):
        respond(EngineError("rank 1 died"))


def test_an_engine_whose_disk_is_full_answers_with_that():
    answer = respond(EngineError("the disk is full: make room", code="kv_store_failed"))
    assert answer.status_code == 503
    assert answer.body["error"] == {
        "message": "the disk is full: make room",
        "type": "server_error",
        "param": None,
        "code": "kv_store_failed",
    }


def test_its_counters_are_the_last_that_were_read():
    manager = SimpleNamespace(get_internal_state=None, check_openai=None)
    answers = LineAnswers(manager, None, lambda: EngineError("full", code="kv_store_failed"))
    assert asyncio.run(answers.stats()).counters == {}


ASKED = (200, {"id": "a", "choices": [{"finish_reason": "abort"}]})
UNASKED = (500, {"error": {"message": "Aborted", "type": "server_error", "param": None, "code": "engine_abort"}})
GOOD = (200, {"id": "b", "choices": [{"finish_reason": "stop"}]})


def answer_after(monkeypatch, *answers):
    """Answer a line with a partial output, where the endpoint gives `answers` in turn.

    Return its answer, how many were taken, and how many tokens the partial output has.
    """
    left = list(answers)

    class Scripted:
        def __init__(self, *_):
            pass

        async def post(self, url, body, rid):
            return left.pop(0)

    monkeypatch.setattr("sgl_batch.engine.line_answers.OpenAIEndpoints", Scripted)
    manager = SimpleNamespace(partial_outputs=PartialOutputs(), check_openai=None)
    partial_output = PartialOutput()
    partial_output.put(0, [1, 2])
    answer = asyncio.run(LineAnswers(manager, None, lambda: None).respond("/v1/completions", {}, partial_output))
    return answer, len(answers) - len(left), len(partial_output)


def test_an_aborted_line_is_repeated_however_often_it_is_aborted(monkeypatch):
    answer, taken, num_tokens = answer_after(monkeypatch, ASKED, ASKED, ASKED, GOOD, GOOD)
    assert (answer.request_id, answer.body["choices"]) == ("b", [{"finish_reason": "stop"}])
    assert (taken, num_tokens) == (4, 0), "from the beginning"


def test_a_line_that_the_engine_itself_aborts_is_tried_twice(monkeypatch):
    answer, taken, num_tokens = answer_after(monkeypatch, UNASKED, GOOD, GOOD)
    assert (answer.status_code, taken, num_tokens) == (200, 2, 0)
    answer, taken, _ = answer_after(monkeypatch, UNASKED, ASKED, UNASKED, GOOD)
    assert (answer.status_code, taken) == (500, 3)
    assert answer.body["error"]["code"] == "engine_abort"


def test_another_error_is_the_lines_answer_at_once(monkeypatch):
    answer, taken, _ = answer_after(monkeypatch, (400, {"error": {"code": "invalid_grammar"}}), GOOD)
    assert (answer.status_code, taken) == (400, 1)


class Waiting:
    """Endpoints that send their request and never answer."""

    def __init__(self, manager, *_):
        self._manager = manager

    async def post(self, url, body, rid):
        self._manager.partial_outputs._sent.add(rid)
        self._manager.rid_to_state[rid] = SimpleNamespace(output_ids=[1, 2, 3])
        self._manager.sent.set()
        await asyncio.Event().wait()


def test_the_partial_output_is_updated_when_a_line_finds_the_engine_dead(monkeypatch):
    monkeypatch.setattr("sgl_batch.engine.line_answers.OpenAIEndpoints", Waiting)

    async def scenario():
        manager = SimpleNamespace(
            partial_outputs=PartialOutputs(), rid_to_state={}, sent=asyncio.Event(), check_openai=None
        )
        death = EngineError("rank 1 died")
        answers = LineAnswers(manager, None, lambda: death if manager.sent.is_set() else None)
        partial_output = PartialOutput()
        with pytest.raises(EngineError, match="rank 1 died"):
            await answers.respond("/v1/completions", {}, partial_output)
        assert list(partial_output.tokens) == [1, 2, 3]

    asyncio.run(scenario())
