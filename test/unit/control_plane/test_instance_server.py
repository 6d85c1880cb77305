"""An instance answers each line once, says what died with its engine, and forgets nothing that was not acknowledged."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from scripted_endpoints import ScriptedEndpoints

from sgl_batch.api.engine_endpoints import Endpoints
from sgl_batch.api.engine_view import EngineView
from sgl_batch.api.supervisor import EngineState
from sgl_batch.control_plane.instances import instance_server as server_module
from sgl_batch.control_plane.instances.http_messages import Control, HttpRequest
from sgl_batch.control_plane.instances.instance_server import ANSWER_LOST, STOPPED, InstanceServer
from sgl_batch.control_plane.instances.messages import EngineFacts, Line, Lot, Poll, Reading, Report
from sgl_batch.control_plane.instances.service_state import FROM_DISK, ServiceState, changed
from sgl_batch.control_plane.instances.spool import Spool
from sgl_batch.core.answers import EngineStats
from sgl_batch.core.partial_output import PartialOutput, unpack
from sgl_batch.core.plan_rates import PlanRates
from sgl_batch.engine.line_frames import Answer, pack_body
from sgl_batch.errors import EngineError

WITHIN_S = 10.0


class FakeEngine:
    """An engine whose lines wait until the test answers them, by the "x" of their bodies."""

    served_model_names = ("tiny",)
    plan_rates: PlanRates | None = None

    def __init__(self) -> None:
        self.waiting: dict[str, asyncio.Future[object]] = {}
        self.partial_outputs: dict[str, PartialOutput] = {}
        self.num_started = 0
        self.num_begun = 0
        self.counters: dict[str, float] = {}

    async def stats(self) -> EngineStats:
        queued = len(self.waiting) - self.num_begun
        return EngineStats(counters=self.counters, sequences={"QUEUED": queued, "RUNNING": self.num_begun})

    async def respond_packed(self, url: str, body: bytes, partial_output: PartialOutput | None = None) -> Answer:
        assert partial_output is not None
        name = str(json.loads(body)["x"])
        self.num_started += 1
        self.waiting[name] = asyncio.get_running_loop().create_future()
        self.partial_outputs[name] = partial_output
        try:
            value = await self.waiting[name]
        finally:
            del self.waiting[name]
        return Answer(number=0, status_code=200, request_id=f"req_{name}", body=pack_body({"y": value}))

    def die(self, message: str, code: str | None = None) -> None:
        for waiter in self.waiting.values():
            waiter.set_exception(EngineError(message, code=code))


class FakeSupervisor:
    """A supervisor of fake engines. The test decides which one is ready."""

    def __init__(self) -> None:
        self.view = EngineView()
        self.engine: FakeEngine | None = FakeEngine()
        self.http: Endpoints | None = None
        self.state = EngineState(phase="ready", message=None, since=0.0, restarts=0, forward="ours")

    def current(self) -> FakeEngine | None:
        return self.engine

    def endpoints(self) -> Endpoints | None:
        return self.http

    def set_phase(self, phase: str, message: str | None = None, restarts: int = 0) -> None:
        self.state = EngineState(phase=phase, message=message, since=0.0, restarts=restarts)

    def start(self) -> asyncio.Task[None]:
        return asyncio.create_task(asyncio.sleep(0))

    async def stop(self) -> None:
        self.set_phase("stopped")
        if self.engine is not None:
            self.engine.die("it was ended")
        await asyncio.sleep(0)


class Instance:
    """An InstanceServer with its supervisor and its clock."""

    def __init__(self, directory: Path, incarnation: int = 1, **options: int) -> None:
        self.now = 0.0
        self.supervisor = FakeSupervisor()
        self.engine = self.supervisor.engine or FakeEngine()
        self.spool = Spool(directory, incarnation, **options)
        self.server = InstanceServer(
            incarnation, self.supervisor, self.spool, log="node7:/logs/engine.log", clock=lambda: self.now
        )
        self.server.start()

    async def submit(self, *names: str, tokens: bytes = b"") -> bool:
        lines = tuple(Line(name, "/v1/completions", json.dumps({"x": name}).encode(), tokens) for name in names)
        taken = await self.server.submit(Lot(lines))
        await asyncio.sleep(0)
        return taken

    async def poll(self, **fields: object) -> Report:
        """Poll without an end: the clock stands still."""
        await asyncio.sleep(0)
        return await self.server.poll(Poll(**{"wait_s": 1.0, **fields}))  # type: ignore[arg-type]

    async def answers(self, *names: str, after: int = 0) -> list[str]:
        """Let the engine answer lines, and return the keys of the next answers once there are so many."""
        for name in names:
            self.engine.waiting[name].set_result(1)
        found: list[str] = []
        while len(found) < len(names):
            report = await self.poll(after_answer=after)
            found += [one.key for one in report.answers]
            after = max([after, *(one.number for one in report.answers)])
        return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits."""
    monkeypatch.setattr(server_module, "_LOOK_EVERY_S", 0.01)


def with_instance(directory: Path, scenario: Callable[[Instance], Awaitable[None]], **options: int) -> None:
    async def run() -> None:
        one = Instance(directory, **options)
        await asyncio.wait_for(one.poll(), WITHIN_S)  # the first report says that it is ready
        await asyncio.wait_for(scenario(one), WITHIN_S)
        await one.server.stop()

    asyncio.run(run())


def test_an_answer_is_reported_until_the_pool_has_it(tmp_path: Path) -> None:
    async def scenario(one: Instance) -> None:
        assert await one.submit("a", "b")
        assert await one.answers("b", "a") == ["b", "a"]
        report = await one.poll()
        assert [(a.number, a.key, a.status_code, a.request_id, a.body) for a in report.answers] == [
            (1, "b", 200, "req_b", b'{"y":1}'),
            (2, "a", 200, "req_a", b'{"y":1}'),
        ]
        report = await one.poll(after_answer=2, acknowledged=("a", "b"), wait_s=0)
        assert report.answers == ()
        assert report.in_flight == 0
        assert (await one.poll(wait_s=0)).answers == ()

    with_instance(tmp_path, scenario)


def test_a_report_says_what_the_engine_is(tmp_path: Path) -> None:
    async def scenario(one: Instance) -> None:
        one.supervisor.view.add(EngineStats(counters={"n": 2}), 0.0)
        await one.submit("a")
        report = await one.poll(wait_s=0)
        assert (report.incarnation, report.phase, report.message, report.in_flight) == (1, "ready", None, 1)
        assert report.facts == EngineFacts(("tiny",), "ours", None)
        assert report.stats == EngineStats(counters={"n": 2})
        engine = one.supervisor.engine
        assert engine is not None
        engine.counters = {"n": 3}
        read = await one.server.stats()
        assert (read.restarts, read.stats and read.stats.counters) == (0, {"n": 3})
        one.supervisor.engine = None
        assert await one.server.stats() == Reading(0, None)

    with_instance(tmp_path, scenario)


def test_a_new_engine_takes_lines_once_it_has_the_weights_of_the_service(tmp_path: Path) -> None:
    async def scenario(one: Instance) -> None:
        http = one.supervisor.http = ScriptedEndpoints()
        http.refuses[FROM_DISK] = 400
        body = b'{"model_path": "b"}'
        before, after = ServiceState(), changed(ServiceState(), FROM_DISK, body)
        await one.server.adopt(after)
        assert (await one.poll()).phase == "updating"
        assert not await one.submit("a")
        report = await one.poll()
        assert (report.phase, report.facts) == ("outdated", None)
        assert f"{FROM_DISK} 400" in str(report.message)
        http.refuses.clear()
        request = HttpRequest("call", "POST", FROM_DISK, (), body)
        answer = await one.server.control(Control(request=request, before=before, after=after))
        assert (answer.status, answer.weight_version) == (200, "b")
        assert (await one.poll()).phase == "ready"
        assert await one.submit("a")

    with_instance(tmp_path, scenario)


def test_a_poll_waits_until_there_is_something_and_a_change_of_state_is_something(tmp_path: Path) -> None:
    async def scenario(one: Instance) -> None:
        waiting = asyncio.ensure_future(one.poll())
        done, _ = await asyncio.wait({waiting}, timeout=0.05)
        assert not done
        one.supervisor.set_phase("stalled", "no progress")
        report = await waiting
        assert report.phase == "stalled"
        assert report.message == "no progress; its log is node7:/logs/engine.log"

    with_instance(tmp_path, scenario)


def test_a_line_that_is_there_is_not_computed_twice(tmp_path: Path) -> None:
    async def scenario(one: Instance) -> None:
        await one.submit("a")
        await one.submit("a")
        assert await one.answers("a") == ["a"]
        # Another line of the same key comes before the first answer is acknowledged: it gets that answer.
        await one.submit("a")
        report = await one.poll(after_answer=1, acknowledged=("a",))
        assert [(answer.number, answer.key) for answer in report.answers] == [(2, "a")]
        assert one.engine.num_started == 1
        await one.poll(after_answer=2, acknowledged=("a",), wait_s=0)
        await one.submit("a")
        assert one.engine.num_started == 2

    with_instance(tmp_path, scenario)


def test_no_line_is_taken_without_an_engine(tmp_path: Path) -> None:
    async def scenario(one: Instance) -> None:
        one.supervisor.engine = None
        assert not await one.submit("a")
        assert await one.server.known() == ()

    with_instance(tmp_path, scenario)


@pytest.mark.parametrize("code", [None, "kv_store_failed"])
def test_an_engines_death_names_the_lines_that_it_had(tmp_path: Path, code: str | None) -> None:
    async def scenario(one: Instance) -> None:
        await one.submit("a", "b", "c", "d")
        await one.server.cancel(("d",))
        assert await one.answers("b") == ["b"]
        one.engine.die("rank 1 died", code)
        report = await one.poll(after_answer=1)
        (death,) = report.deaths
        assert (death.number, death.code, sorted(death.keys)) == (1, code, ["a", "c"])
        assert death.message == "rank 1 died; its log is node7:/logs/engine.log"
        assert report.in_flight == 0
        assert not await one.submit("a"), "the dead engine takes no line"
        one.supervisor.engine = one.engine = FakeEngine()
        assert await one.submit("a")
        assert await one.answers("a", after=1) == ["a"]
        assert len((await one.poll(after_answer=2, wait_s=0)).deaths) == 1, "the pool has not got it yet"
        assert (await one.poll(after_answer=2, after_death=1, wait_s=0)).deaths == ()

    with_instance(tmp_path, scenario)


def test_a_stop_blames_no_line(tmp_path: Path) -> None:
    async def scenario(one: Instance) -> None:
        await one.submit("a")
        await one.server.stop()
        report = await one.poll(wait_s=0)
        assert report.phase == "stopped"
        assert [(death.code, death.keys) for death in report.deaths] == [(STOPPED, ("a",))]

    with_instance(tmp_path, scenario)


def test_tokens_are_reported_once_a_second_from_where_the_last_report_ended(tmp_path: Path) -> None:
    async def scenario(one: Instance) -> None:
        await one.submit("a", tokens=PartialOutput(b"\1\0\0\0").pack())
        assert list(one.engine.partial_outputs["a"].tokens) == [1]
        one.engine.partial_outputs["a"].put(1, [2, 3])
        assert (await one.poll(wait_s=0)).tokens == ()
        one.now = 1.0
        (tokens,) = (await one.poll()).tokens
        assert (tokens.key, tokens.start, list(unpack(tokens.tokens))) == ("a", 1, [2, 3])
        one.now = 2.0
        assert (await one.poll(wait_s=0)).tokens == ()
        await one.submit("a")
        one.now = 3.0
        (tokens,) = (await one.poll()).tokens
        assert (tokens.start, list(unpack(tokens.tokens))) == (0, [1, 2, 3]), "a new server has none of them"

    with_instance(tmp_path, scenario)


def test_the_last_tokens_of_lines_come_before_their_engines_death(tmp_path: Path) -> None:
    async def scenario(one: Instance) -> None:
        await one.submit("a")
        one.engine.partial_outputs["a"].put(0, [5])
        one.engine.die("gone")
        report = await one.poll()
        assert [tokens.key for tokens in report.tokens] == ["a"]
        assert [death.keys for death in report.deaths] == [("a",)]

    with_instance(tmp_path, scenario)


def test_lines_that_the_engine_has_begun_are_taken_back_only_by_their_keys(tmp_path: Path) -> None:
    async def scenario(one: Instance) -> None:
        await one.submit("a", "b", "c", "d")
        one.engine.num_begun = 3
        assert await one.server.take_back(4) == ("d",)
        await asyncio.sleep(0)
        assert await one.server.take_back(2, ("b", "d", "x")) == ("b",)
        assert await one.answers("a", "c") == ["a", "c"]

    with_instance(tmp_path, scenario)


def test_lines_that_the_next_prefill_pass_begins_are_not_taken_back(tmp_path: Path) -> None:
    async def scenario(one: Instance) -> None:
        await one.submit(*"abcdefgh")
        one.engine.num_begun = 2
        one.engine.counters = {"prefill_groups": 3, "sequences_finished": 10}
        assert await one.server.take_back(8) == ("h", "g")
        await asyncio.sleep(0)
        assert await one.server.take_back(8) == ()
        assert await one.answers(*"abcdef") == list("abcdef")

    with_instance(tmp_path, scenario)


def test_lines_without_tokens_are_taken_back_the_last_ones_first(tmp_path: Path) -> None:
    async def scenario(one: Instance) -> None:
        await one.submit("a", "b", "c", "d")
        one.engine.partial_outputs["c"].put(0, [5])
        assert await one.server.take_back(2) == ("d", "b")
        await asyncio.sleep(0)
        assert sorted(one.engine.waiting) == ["a", "c"]
        assert await one.server.known() == ("a", "c")
        assert await one.answers("c", "a") == ["c", "a"]

    with_instance(tmp_path, scenario)


def test_a_fault_of_the_engine_with_one_line_is_that_lines_answer(tmp_path: Path) -> None:
    async def scenario(one: Instance) -> None:
        await one.submit("a", "b")
        one.engine.waiting["a"].set_exception(ZeroDivisionError("by zero"))
        report = await one.poll()
        assert [(answer.key, answer.status_code) for answer in report.answers] == [("a", 500)]
        assert b"ZeroDivisionError: by zero" in report.answers[0].body
        assert await one.server.known() == ("b",)

    with_instance(tmp_path, scenario)


def test_an_answer_that_nobody_waits_for_is_there_for_the_next_incarnation(tmp_path: Path) -> None:
    async def first(one: Instance) -> None:
        await one.submit("a")
        one.engine.waiting["a"].set_result(1)

    async def second() -> None:
        one = Instance(tmp_path, 2)
        report = await one.poll()
        assert [(answer.number, answer.key) for answer in report.answers] == [(1, "a")]
        assert await one.submit("a")
        assert one.engine.num_started == 0
        await one.server.stop()

    with_instance(tmp_path, first)
    asyncio.run(second())


def test_a_line_whose_answer_the_disk_has_lost_goes_back_to_the_pool(tmp_path: Path) -> None:
    async def scenario(one: Instance) -> None:
        await one.submit("a")
        one.engine.waiting["a"].set_result(1)
        while not len(one.spool):
            await asyncio.sleep(0.001)
        (segment,) = tmp_path.iterdir()
        segment.write_bytes(b"")
        report = await one.poll()
        assert [(death.code, death.keys) for death in report.deaths] == [(ANSWER_LOST, ("a",))]

    with_instance(tmp_path, scenario, memory_bytes=0)


def test_a_full_disk_is_in_the_message(tmp_path: Path) -> None:
    async def scenario(one: Instance) -> None:
        one.spool.message = "writing failed"
        assert (await one.poll()).message == "writing failed"

    with_instance(tmp_path, scenario)


def test_a_supervisor_that_fails_is_a_failed_instance(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = Instance(tmp_path)

        async def broken() -> None:
            raise ZeroDivisionError("by zero")

        one.supervisor.start = lambda: asyncio.create_task(broken())  # type: ignore[method-assign]
        one.server.start()
        began = time.monotonic()
        while (report := await one.poll(wait_s=0)).phase != "failed":
            assert time.monotonic() < began + WITHIN_S
        assert "ZeroDivisionError" in (report.message or "")

    asyncio.run(scenario())
