"""Lines reach an engine in another process unchanged, and every caller gets its death."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from sgl_batch.core.answers import EngineStats, LineResponse
from sgl_batch.core.partial_output import PartialOutput
from sgl_batch.core.plan_rates import PlanRates
from sgl_batch.engine import line_channel
from sgl_batch.engine.line_channel import LineClient, serve_lines
from sgl_batch.engine.line_frames import (
    MAX_FRAME_BYTES,
    Failed,
    FrameError,
    Frames,
    FromEngine,
    FromFront,
    Ready,
    pack_body,
    unpack_body,
)
from sgl_batch.errors import EngineError

STATS = EngineStats(
    counters={"expert_calls": 3},
    part_s={"experts": 0.5},
    tokens_per_expert=[1, 2],
    sequences={"RUNNING": 4},
    ranks=(EngineStats(counters={"expert_calls": 1}), EngineStats()),
)


class Engine:
    """Returns each request as its answer, when released; `generated` are the tokens of each answer so far."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.partial_outputs: dict[str, PartialOutput] = {}
        self.generated: list[int] = []
        self.cancelled: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.changed = asyncio.Event()
        self.fault: Exception | None = None
        self.death: EngineError | None = None

    async def respond(self, url: str, body: Mapping[str, object], partial_output: PartialOutput) -> LineResponse:
        name = str(body.get("name"))
        self.partial_outputs[name] = partial_output
        self.begun.append(name)
        self.changed.set()
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            self.changed.set()
            raise
        if self.death is not None:
            self.update_partial_outputs()
            raise self.death
        if self.fault is not None:
            raise self.fault
        return LineResponse(status_code=200, request_id=f"id-{name}", body={"url": url, **body})

    def update_partial_outputs(self) -> None:
        for partial_output in self.partial_outputs.values():
            if len(self.generated) > len(partial_output):
                partial_output.put(len(partial_output), self.generated[len(partial_output) :])

    async def stats(self) -> EngineStats:
        return STATS


async def connect() -> tuple[Frames[FromEngine], Frames[FromFront]]:
    ours, theirs = socket.socketpair()
    front = Frames[FromEngine](*await asyncio.open_unix_connection(sock=ours), FromEngine)
    worker = Frames[FromFront](*await asyncio.open_unix_connection(sock=theirs), FromFront)
    return front, worker


@asynccontextmanager
async def conversation(engine: Engine) -> AsyncIterator[tuple[LineClient, asyncio.Task[object], asyncio.Task[object]]]:
    """Give a client that reads, with a server at the other end."""
    front, worker = await connect()
    client = LineClient(front, ("tiny",))
    reading = asyncio.ensure_future(client.read_answers())
    serving = asyncio.ensure_future(serve_lines(worker, engine))
    try:
        yield client, reading, serving
    finally:
        front.close()
        worker.close()
        await asyncio.wait({reading, serving}, timeout=5)


async def seen(engine: Engine, names: list[str], kind: str = "begun") -> None:
    while sorted(getattr(engine, kind)) != sorted(names):
        engine.changed.clear()
        await asyncio.wait_for(engine.changed.wait(), 5)


def test_answers_reach_their_callers_in_any_order():
    async def run() -> None:
        async with conversation(Engine()) as (client, _, _):
            asked = [client.respond("/v1/completions", {"name": str(i), "priority": i}) for i in range(100)]
            for number, answer in enumerate(await asyncio.gather(*asked)):
                assert answer.body == {"url": "/v1/completions", "name": str(number), "priority": number}
                assert answer.request_id == f"id-{number}"
            assert client.num_in_flight == 0
            assert client.num_answered == 100

    asyncio.run(run())


def test_a_body_travels_unchanged_whatever_numbers_and_characters_it_has():
    body = {"big": 10**40, "negative": -(2**63) - 1, "half": "\ud800", "text": "é\u2028", "deep": [{"x": [None, 1.5]}]}
    assert unpack_body(pack_body(body)) == body


def test_a_number_that_is_not_finite_does_not_become_null():
    body = {"logprob": float("-inf"), "other": [None, "null", float("inf")]}
    assert unpack_body(pack_body(body)) == body


def test_equal_bodies_have_equal_bytes():
    bodies = [{"a": [1.0, 1e22, None], "b": "é"}, {"a": "\ud800", "b": 10**40}]
    for body in bodies:
        assert pack_body(body) == pack_body(json.loads(json.dumps(body)))


def test_statistics_come_with_those_of_ranks():
    async def run() -> None:
        async with conversation(Engine()) as (client, _, _):
            stats = await client.stats()
            assert stats.counters == STATS.counters
            assert list(stats.tokens_per_expert) == [1, 2]
            assert stats.sequences == {"RUNNING": 4}
            assert [rank.counters for rank in stats.ranks] == [{"expert_calls": 1}, {}]

    asyncio.run(run())


def test_cancelling_a_line_aborts_it_at_the_engine():
    async def run() -> None:
        engine = Engine()
        engine.may_answer.clear()
        async with conversation(engine) as (client, _, _):
            tasks = [asyncio.ensure_future(client.respond("/v1/completions", {"name": name})) for name in "ab"]
            await seen(engine, ["a", "b"])
            tasks[0].cancel()
            await seen(engine, ["a"], "cancelled")
            engine.may_answer.set()
            assert (await tasks[1]).body["name"] == "b"

    asyncio.run(run())


def test_the_end_of_the_connection_aborts_all_lines():
    async def run() -> None:
        engine = Engine()
        engine.may_answer.clear()
        async with conversation(engine) as (client, reading, serving):
            asked = asyncio.ensure_future(client.respond("/v1/completions", {"name": "a"}))
            await seen(engine, ["a"])
            client.fail(EngineError("given up"))
            assert await asyncio.wait_for(serving, 5) is None
            assert engine.cancelled == ["a"]
            with pytest.raises(EngineError, match="given up"):
                await asked
            assert client.was_busy
            await asyncio.wait_for(reading, 5)

    asyncio.run(run())


def test_a_dead_engine_ends_the_connection_with_its_error():
    async def run() -> None:
        engine = Engine()
        engine.fault = EngineError("rank 1 died", code="kv_store_failed")
        async with conversation(engine) as (client, _, serving):
            asked = asyncio.ensure_future(client.respond("/v1/completions", {"name": "a"}))
            death = await asyncio.wait_for(serving, 5)
            assert (str(death), death.code) == ("rank 1 died", "kv_store_failed")
            assert not asked.done(), "a waiting caller gets the death when its cause is known"
            asked.cancel()

    asyncio.run(run())


@pytest.fixture
def frequent_reports(monkeypatch):
    """Report tokens often, so that no test waits two seconds."""
    monkeypatch.setattr(line_channel, "_REPORT_EVERY_S", 0.01)


async def grown(partial_output: PartialOutput, num_tokens: int) -> None:
    deadline = asyncio.get_running_loop().time() + 5
    while len(partial_output) < num_tokens:
        assert asyncio.get_running_loop().time() < deadline, "the tokens were not reported"
        await asyncio.sleep(0.005)


def test_tokens_of_lines_in_flight_are_reported_while_they_are_generated(frequent_reports):
    async def run() -> None:
        engine, partial_outputs = Engine(), [PartialOutput() for _ in range(3)]
        engine.may_answer.clear()
        async with conversation(engine) as (client, _, _):
            asked = [client.respond("/v1/completions", {"name": str(i)}, one) for i, one in enumerate(partial_outputs)]
            answers = asyncio.gather(*asked)
            await seen(engine, ["0", "1", "2"])
            for num_tokens in (50, 100):
                engine.generated = list(range(num_tokens))
                for partial_output in partial_outputs:
                    await grown(partial_output, num_tokens)
                    assert list(partial_output.tokens) == engine.generated
            engine.may_answer.set()
            await answers

    asyncio.run(run())


def test_a_line_continues_its_partial_output_on_the_next_engine(frequent_reports):
    async def run() -> None:
        engine, partial_output = Engine(), PartialOutput()
        engine.may_answer.clear()
        partial_output.put(0, [0, 1, 2])
        async with conversation(engine) as (client, _, _):
            asked = asyncio.ensure_future(client.respond("/v1/completions", {"name": "a"}, partial_output))
            await seen(engine, ["a"])
            assert list(engine.partial_outputs["a"].tokens) == [0, 1, 2]
            engine.generated = [0, 1, 2, 3]
            await grown(partial_output, 4)
            engine.may_answer.set()
            await asked
        assert list(partial_output.tokens) == [0, 1, 2, 3]

    asyncio.run(run())


@pytest.mark.parametrize("most_bytes", [1, 1 << 18], ids=["in many messages", "in one"])
@pytest.mark.parametrize("by_lines", [False, True], ids=["the worker sees it", "all lines see it"])
def test_tokens_of_lines_are_reported_before_the_engine_reports_its_death(monkeypatch, most_bytes, by_lines):
    monkeypatch.setattr(line_channel, "_REPORT_BYTES", most_bytes)

    async def run() -> None:
        engine, partial_outputs = Engine(), [PartialOutput() for _ in range(5)]
        engine.may_answer.clear()
        front, worker = await connect()
        client = LineClient(front, ("tiny",))
        reading = asyncio.ensure_future(client.read_answers())
        serving = asyncio.ensure_future(serve_lines(worker, engine))
        asked = [client.respond("/v1/completions", {"name": str(i)}, one) for i, one in enumerate(partial_outputs)]
        answers = asyncio.gather(*asked, return_exceptions=True)
        await seen(engine, [str(i) for i in range(5)])
        engine.generated = [7] * 60
        if by_lines:
            engine.death = EngineError("rank 1 died")
            engine.may_answer.set()
        else:
            serving.cancel()
        await asyncio.wait({serving}, timeout=5)
        await worker.send(Failed(message="rank 1 died", code=None))
        assert await asyncio.wait_for(reading, 5) == Failed(message="rank 1 died", code=None)
        assert [list(one.tokens) for one in partial_outputs] == [[7] * 60] * 5
        client.fail(EngineError("rank 1 died"))
        assert all(isinstance(answer, EngineError) for answer in await answers)
        worker.close()

    asyncio.run(run())


def test_no_tokens_of_answered_lines_are_reported(frequent_reports):
    async def run() -> None:
        engine, partial_output = Engine(), PartialOutput()
        async with conversation(engine) as (client, _, _):
            await client.respond("/v1/completions", {"name": "a"}, partial_output)
            engine.generated = [1, 2, 3]
            engine.may_answer.clear()
            later = PartialOutput()
            asked = asyncio.ensure_future(client.respond("/v1/completions", {"name": "b"}, later))
            await grown(later, 3)
            assert len(partial_output) == 0
            engine.may_answer.set()
            await asked

    asyncio.run(run())


def test_a_reported_failure_reaches_the_reader_of_answers():
    async def run() -> None:
        front, worker = await connect()
        client = LineClient(front, ("tiny",))
        await worker.send(Failed(message="no memory", code=None))
        assert await client.read_answers() == Failed(message="no memory", code=None)
        worker.close()

    asyncio.run(run())


def test_a_failure_is_read_though_requests_are_on_their_way_to_the_engine_that_ends():
    async def run() -> None:
        front, worker = await connect()
        client, failure = LineClient(front, ("tiny",)), Failed(message="no space", code="no_space")

        async def end() -> None:
            await worker.send_last(failure)
            worker.close()

        asked, ending = [asyncio.ensure_future(client.stats())], asyncio.ensure_future(end())
        for _ in range(3):
            await asyncio.sleep(0.02)
            asked.append(asyncio.ensure_future(client.stats()))
        assert await client.read_answers() == failure
        await asyncio.wait_for(ending, 2)
        client.fail(EngineError("no space"))
        assert all(isinstance(one, EngineError) for one in await asyncio.gather(*asked, return_exceptions=True))

    asyncio.run(run())


def test_an_engine_that_ends_does_not_wait_for_ever_for_a_server_that_does_not_read(monkeypatch):
    async def run() -> None:
        front, worker = await connect()
        ending = asyncio.ensure_future(worker.send_last(Failed(message="no space", code=None)))
        await asyncio.sleep(0.01)
        assert not ending.done()
        await asyncio.wait_for(ending, 5)
        front.close()
        await asyncio.wait_for(worker.send_last(Failed(message="no space", code=None)), 5)
        worker.close()

    monkeypatch.setattr("sgl_batch.engine.line_frames._LAST_WITHIN_S", 0.2)
    asyncio.run(run())


def test_a_dead_engine_gets_no_requests():
    async def run() -> None:
        async with conversation(Engine()) as (client, _, _):
            client.fail(EngineError("it is dead"))
            with pytest.raises(EngineError, match="it is dead"):
                await client.respond("/v1/completions", {})
            with pytest.raises(EngineError, match="it is dead"):
                await client.stats()

    asyncio.run(run())


def test_a_line_that_meets_a_fault_of_the_program_gets_500_and_the_others_go_on():
    async def run() -> None:
        engine = Engine()
        async with conversation(engine) as (client, _, _):
            engine.fault = ZeroDivisionError("a fault")
            answer = await client.respond("/v1/completions", {"name": "a"})
            assert (answer.status_code, answer.body["error"]["code"]) == (500, "internal_error")
            engine.fault = None
            assert (await client.respond("/v1/completions", {"name": "b"})).status_code == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((MAX_FRAME_BYTES + 1).to_bytes(4, "big"), "at most"),
        (b"\0\0\0\3abc", "not a message of ours"),
        (b"\0\0\0\1\x80", "not a message of ours"),
    ],
)
def test_bytes_that_are_not_a_message_end_the_connection(data, words):
    async def run() -> None:
        ours, theirs = socket.socketpair()
        frames = Frames[FromEngine](*await asyncio.open_unix_connection(sock=ours), FromEngine)
        theirs.sendall(data)
        theirs.close()
        with pytest.raises(FrameError, match=words):
            await frames.read()
        frames.close()

    asyncio.run(run())


def test_a_connection_that_ends_within_a_message_has_ended():
    async def run() -> None:
        ours, theirs = socket.socketpair()
        frames = Frames[FromEngine](*await asyncio.open_unix_connection(sock=ours), FromEngine)
        theirs.sendall(b"\0\0\1\0abc")
        theirs.close()
        assert await frames.read() is None
        frames.close()

    asyncio.run(run())


def test_an_engine_says_with_its_readiness_what_its_plan_predicts():
    async def run() -> None:
        front, worker = await connect()
        ready = Ready(
            served_model_names=("tiny",),
            plan_rates=PlanRates(prompt_tokens_per_s=200.0, output_tokens_per_s=30.5, step_s=0.01),
        )
        await worker.send(ready)
        assert await front.read() == ready
        worker.close()
        front.close()

    asyncio.run(run())


def test_an_engine_says_once_that_it_is_ready():
    async def run() -> None:
        front, worker = await connect()
        await worker.send(Ready(served_model_names=("tiny",)))
        with pytest.raises(FrameError, match="twice"):
            await LineClient(front, ("tiny",)).read_answers()
        worker.close()
        front.close()

    asyncio.run(run())
