"""The driver: every line exactly once and in order, whatever the engine, the lines or the disk do."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_memory_engine import InMemoryEngine, answer, refusal, request

from sgl_batch.core.answers import EngineStats
from sgl_batch.errors import EngineError
from sgl_batch.file_run import file_run
from sgl_batch.file_run.file_run import FileRun, RunSettings
from sgl_batch.file_run.line_file import LineFile
from sgl_batch.file_run.ordered_output import OrderedOutput
from sgl_batch.file_run.run_result import RunStatus
from sgl_batch.file_run.waiting_results import WaitingResults
from sgl_batch.jobs.line_reader import read_lines, scan_input
from sgl_batch.jobs.progress_display import PlainDisplay
from sgl_batch.jobs.request_line import LineRules
from sgl_batch.jobs.scratch import StorageError
from sgl_batch.jobs.seeds import line_seed
from sgl_batch.jobs.seen_ids import SeenIds

# No deadline: a busy machine is no fault of the code.
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

MAX_LINE_BYTES = 2000


@dataclass
class Job:
    """A job over `lines` (dicts are written as JSON, bytes as they are) in `directory`."""

    directory: Path
    lines: list
    engine: InMemoryEngine
    max_in_flight: int = 16
    file_bytes: int = 1 << 20
    total: int | None = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    log: io.StringIO = field(default_factory=io.StringIO)

    def run(self):
        return asyncio.run(self.drive())

    async def drive(self):
        path = self.directory / "in.jsonl"
        encoded = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in self.lines]
        path.write_bytes(b"\n".join(encoded) + b"\n")
        seen = SeenIds(self.directory / "seen.db")
        output = OrderedOutput(
            LineFile(self.directory / "out.jsonl"),
            LineFile(self.directory / "out.errors.jsonl"),
            WaitingResults(self.directory / "out.jsonl", file_bytes=self.file_bytes),
        )
        settings = RunSettings(
            run_id="run",
            total=scan_input(path).num_lines if self.total is None else self.total,
            rules=LineRules(served_model_names=("tiny",), job_seed=3, max_line_bytes=MAX_LINE_BYTES),
            max_in_flight=self.max_in_flight,
            tick_s=0.01,
        )
        lines = read_lines(path, MAX_LINE_BYTES)
        run = FileRun(settings, lines, self.engine, output, seen.claim, PlainDisplay(self.log))
        try:
            return await run.run(self.stop)
        finally:
            output.close()
            seen.close()

    def read(self, name):
        path = self.directory / name
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    @property
    def outputs(self):
        return self.read("out.jsonl")

    @property
    def errors(self):
        return self.read("out.errors.jsonl")


def ids(result_lines):
    return [one["custom_id"] for one in result_lines]


def code_of(result_line):
    return result_line["response"]["body"]["error"]["code"]


def waits(turns):
    """An engine whose answer to prompt N comes after turns[N] turns of the event loop."""

    async def before(body):
        for _ in range(turns[int(body["prompt"])]):
            await asyncio.sleep(0)

    return InMemoryEngine(before)


@QUICK
@given(
    turns=st.lists(st.integers(0, 30), min_size=1, max_size=60),
    bad=st.sets(st.integers(0, 59)),
    max_in_flight=st.integers(1, 20),
    file_bytes=st.sampled_from([1, 3000, 1 << 20]),
)
def test_every_line_gives_exactly_one_result_line_in_input_order(
    tmp_path_factory, turns, bad, max_in_flight, file_bytes
):
    lines = [b"{" if i in bad else request(f"id-{i}", str(i)) for i in range(len(turns))]
    engine = waits(turns)
    job = Job(tmp_path_factory.mktemp("job"), lines, engine, max_in_flight, file_bytes)
    result = job.run()
    good = [i for i in range(len(turns)) if i not in bad]
    assert ids(job.outputs) == [f"id-{i}" for i in good]
    assert [one["response"]["body"]["error"]["line"] for one in job.errors] == [
        i + 1 for i in range(len(turns)) if i in bad
    ]
    assert (result.ok, result.failed, result.missing) == (len(good), len(turns) - len(good), 0)
    assert engine.most_running <= max_in_flight
    assert {one.name for one in job.directory.iterdir()} <= {"in.jsonl", "out.jsonl", "out.errors.jsonl"}


def test_each_malformed_line_gives_its_own_error_and_stops_nothing(tmp_path):
    good = request("good")
    lines = {
        "invalid_json_line": b'{"custom_id": ',
        "line_not_an_object": b"[]",
        "missing_custom_id": {**good, "custom_id": None},
        "invalid_custom_id": {**good, "custom_id": 4},
        "missing_method": {**good, "custom_id": "m", "method": None},
        "invalid_method": {**good, "custom_id": "n", "method": "PUT"},
        "missing_url": {**good, "custom_id": "o", "url": None},
        "url_not_supported": {**good, "custom_id": "p", "url": "/v1/responses"},
        "missing_body": {**good, "custom_id": "q", "body": None},
        "invalid_body": {**good, "custom_id": "r", "body": []},
        "model_mismatch": request("s", model="gpt-4"),
        "empty_messages": {
            **good,
            "custom_id": "t",
            "url": "/v1/chat/completions",
            "body": {"model": "tiny", "messages": []},
        },
        "empty_prompt": request("u", ""),
        "invalid_max_tokens": request("v", max_tokens=-1),
        "stream_not_supported": request("w", stream=True),
        "line_too_long": request("x", "a" * MAX_LINE_BYTES),
        "context_length_exceeded": request("y", "too long for the model"),
        "duplicate_custom_id": request("first"),
    }

    async def before(body):
        return refusal() if body["prompt"] == "too long for the model" else None

    job = Job(tmp_path, [request("first"), *lines.values(), request("last")], InMemoryEngine(before))
    result = job.run()
    assert [code_of(one) for one in job.errors] == list(lines)
    assert [one["response"]["body"]["error"]["line"] for one in job.errors] == list(range(2, len(lines) + 2))
    assert all(one["response"]["status_code"] == 400 and one["error"] is None for one in job.errors)
    assert ids(job.errors)[:4] == [None] * 4
    assert ids(job.outputs) == ["first", "last"]
    assert result.exit_code == 2
    assert {code: kind.count for code, kind in result.failures.items()} == dict.fromkeys(lines, 1)


def test_outputs_are_the_engines_answers_with_derived_seeds_and_counted_usage(tmp_path):
    job = Job(tmp_path, [request("a"), request("b", seed=8)], InMemoryEngine())
    result = job.run()
    bodies = [request("a", seed=line_seed(3, 0))["body"], request("b", seed=8)["body"]]
    assert [one["response"]["body"] for one in job.outputs] == [answer("/v1/completions", body).body for body in bodies]
    assert (result.tokens_in, result.tokens_out, result.exit_code) == (14, 10, 0)
    assert result.stats == EngineStats(
        counters={"expert_calls": 4, "expert_rows": 40, "expert_gemms": 8},
        part_s={"attention": 2.0, "experts": 6.0},
        tokens_per_expert=[2, 6],
    )


def test_a_line_is_written_as_soon_as_its_earlier_lines_are(tmp_path):
    seen_in_file = []

    async def before(body):
        if body["prompt"] == "look":
            while len(seen_in_file) < 2:
                seen_in_file[:] = ids(job.outputs)
                await asyncio.sleep(0)

    job = Job(tmp_path, [request("a"), request("b"), request("c", "look")], InMemoryEngine(before))
    job.run()
    assert seen_in_file == ["a", "b"]


def test_a_dead_engine_ends_the_run_with_all_that_was_finished(tmp_path):
    async def before(body):
        if body["prompt"] == "die":
            while job.engine.num_answered < 8:
                await asyncio.sleep(0)
            raise EngineError("the scheduler process ended with signal 9")
        if body["prompt"] == "never":
            await asyncio.Event().wait()

    prompts = ["x", "x", "never", "x", "die", "x", "x", "x", "x", "x", "never"]
    lines = [request(f"id-{i}", prompt) for i, prompt in enumerate(prompts)]
    job = Job(tmp_path, lines, InMemoryEngine(before))
    result = job.run()
    assert ids(job.outputs) == [f"id-{i}" for i in (0, 1, 3, 5, 6, 7, 8, 9)]
    assert job.errors == []
    assert (result.status, result.exit_code, result.missing) == (RunStatus.FAILED, 3, 3)
    assert "signal 9" in result.message


def test_an_engine_that_dies_silently_is_noticed_by_its_counters(tmp_path, monkeypatch):
    monkeypatch.setattr(file_run, "STATS_EVERY_S", 0.0)

    async def never(body):
        await asyncio.Event().wait()

    class Dying(InMemoryEngine):
        async def stats(self):
            if self.num_running:
                raise EngineError("no answer")
            return await super().stats()

    result = Job(tmp_path, [request("a"), request("b")], Dying(never)).run()
    assert (result.status, result.missing) == (RunStatus.FAILED, 2)


def test_a_stop_writes_all_that_is_finished_in_order_and_gives_up_the_rest(tmp_path):
    async def before(body):
        if body["prompt"] == "never":
            if job.engine.num_answered >= 6:
                job.stop.set()
            await asyncio.Event().wait()

    prompts = ["x", "never", "x", "x", "never", "x", "x", "x", "never"] + ["x"] * 50
    lines = [request(f"id-{i}", prompt) for i, prompt in enumerate(prompts)]
    job = Job(tmp_path, lines, InMemoryEngine(before), max_in_flight=4)
    result = job.run()
    written = [int(one.removeprefix("id-")) for one in ids(job.outputs)]
    assert written == sorted(written)
    assert {0, 2, 3, 5, 6, 7} <= set(written)
    assert not {1, 4, 8} & set(written)
    assert (result.status, result.exit_code) == (RunStatus.INTERRUPTED, 130)
    assert result.missing == len(lines) - len(written)
    assert job.engine.num_running == 0
    assert "Stopping" in job.log.getvalue()


def test_a_stop_before_the_first_line_runs_nothing(tmp_path):
    job = Job(tmp_path, [request("a")], InMemoryEngine())
    job.stop.set()
    result = job.run()
    assert (result.exit_code, result.missing, job.outputs) == (130, 1, [])


def test_a_fault_of_the_program_on_one_line_fails_that_line_only(tmp_path, caplog):
    async def before(body):
        if body["prompt"] == "fault":
            raise KeyError("surprise")

    job = Job(tmp_path, [request("a"), request("b", "fault"), request("c")], InMemoryEngine(before))
    result = job.run()
    assert (ids(job.outputs), ids(job.errors), result.exit_code) == (["a", "c"], ["b"], 2)
    assert job.errors[0]["response"]["status_code"] == 500
    assert code_of(job.errors[0]) == "internal_error"
    assert "surprise" in caplog.text


def test_a_line_that_the_engine_cancels_is_never_lost_silently(tmp_path):
    async def before(body):
        if body["prompt"] == "cancel":
            raise asyncio.CancelledError

    result = Job(tmp_path, [request("a", "cancel")], InMemoryEngine(before)).run()
    assert (result.status, result.missing) == (RunStatus.FAILED, 1)
    assert "line 1" in result.message


def test_a_failing_disk_ends_the_run_with_an_error(tmp_path, monkeypatch):
    def full(self, lines):
        raise StorageError("writing out.jsonl failed: No space left on device")

    monkeypatch.setattr(LineFile, "append", full)
    job = Job(tmp_path, [request(f"id-{i}") for i in range(100)], InMemoryEngine(), max_in_flight=4)
    result = job.run()
    assert (result.status, result.exit_code, result.missing) == (RunStatus.FAILED, 3, 100)
    assert "No space left" in result.message
    assert "No space left" in job.log.getvalue()
    assert job.engine.num_answered < 20


def test_an_input_that_got_shorter_meanwhile_fails_after_its_lines(tmp_path):
    job = Job(tmp_path, [request("a"), request("b")], InMemoryEngine(), total=5)
    result = job.run()
    assert ids(job.outputs) == ["a", "b"]
    assert (result.status, result.missing) == (RunStatus.FAILED, 3)
    assert "changed" in result.message


def test_large_lines_are_not_all_taken_in_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(file_run, "MAX_IN_FLIGHT_BYTES", 4000)

    async def before(body):
        await asyncio.sleep(0)

    lines = [request(f"id-{i}", "x" * 1000) for i in range(20)]
    engine = InMemoryEngine(before)
    assert Job(tmp_path, lines, engine, max_in_flight=100).run().ok == 20
    assert engine.most_running == 3


@pytest.mark.parametrize("file_bytes", [10_000, 1 << 20])
def test_a_slow_first_line_lets_all_others_finish(tmp_path, file_bytes):
    async def before(body):
        if body["prompt"] == "slow":
            while job.engine.num_answered < 2000:
                await asyncio.sleep(0)

    lines = [request("slow", "slow")] + [request(f"id-{i}") for i in range(2000)]
    job = Job(tmp_path, lines, InMemoryEngine(before), file_bytes=file_bytes)
    assert job.run().ok == 2001
    assert ids(job.outputs) == [one["custom_id"] for one in lines]


def test_live_counters_show_rates_while_no_line_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(file_run, "STATS_EVERY_S", 0.0)

    class Counting(InMemoryEngine):
        num_readings = 0

        async def stats(self):
            self.num_readings += 1
            tokens = 1000 * self.num_readings
            return EngineStats(counters={"prompt_tokens": tokens, "output_tokens": tokens})

    async def before(body):
        while engine.num_readings < 4:
            await asyncio.sleep(0)

    engine = Counting(before)
    job = Job(tmp_path, [request("a")], engine)
    assert job.run().ok == 1
    last = job.log.getvalue().splitlines()[-1]
    assert "1/1 lines" in last
    assert "in 0 tok/s" not in last
