"""An aborted sequence ends at once in every state; no other answer changes and every page is given back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import Prompts

pytestmark = pytest.mark.engine

# Two sequences run, two are READY and the rest are QUEUED until one of the first two ends, long after every abort here.
SETTINGS = {"b_moe_decode": 2, "ready_ahead": 1.0, "max_total_tokens": 4096}
LONG = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}
SAMPLED = {**LONG, "temperature": 0.9, "sampling_seed": 5}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("abort") / "trace.jsonl"


@pytest.fixture
def engine(batch_engine: Callable[..., Any], trace: Path) -> Any:
    return batch_engine("tiny-qwen3-moe", **SETTINGS, trace_file=str(trace))


@pytest.fixture(scope="module")
def alone() -> Callable[..., list[list[int]]]:
    """Return a function that gives the output ids of each choice of a prompt when nothing else runs."""
    answers: dict[str, list[list[int]]] = {}

    def ask(engine: Any, input_ids: list[int], parameters: dict[str, Any]) -> list[list[int]]:
        key = json.dumps([input_ids, parameters])
        if key not in answers:
            results = engine.generate(input_ids=[input_ids], sampling_params=parameters)
            answers[key] = [result["output_ids"] for result in results]
        return answers[key]

    return ask


class Streams:
    """Streamed answers to several requests: the number of tokens of each, by request id, and its last chunk."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._progress = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self.tokens: dict[str, int] = {}
        self.finish: dict[str, dict[str, Any]] = {}
        self.output_ids: dict[str, list[int]] = {}

    def start(self, input_ids: list[int], parameters: dict[str, Any], rid: str) -> None:
        self._tasks.append(asyncio.ensure_future(self._read(input_ids, parameters, rid)))

    async def _read(self, input_ids: list[int], parameters: dict[str, Any], rid: str) -> None:
        stream = await self._engine.async_generate(
            input_ids=input_ids, sampling_params=parameters, rid=rid, stream=True
        )
        async for chunk in stream:
            meta = chunk["meta_info"]
            async with self._progress:
                self.tokens[meta["id"]] = meta["completion_tokens"]
                if meta["finish_reason"] is not None:
                    self.finish[meta["id"]] = meta["finish_reason"]
                    self.output_ids[meta["id"]] = chunk["output_ids"]
                self._progress.notify_all()

    async def until(self, reached: Callable[[], bool]) -> None:
        async with self._progress:
            await asyncio.wait_for(self._progress.wait_for(reached), timeout=120)

    async def until_in_states(self, running: list[str], ready: list[str]) -> None:
        """Wait until `running` have a second token, which is decoded, and `ready` a first, which prefill gives."""
        await self.until(
            lambda: all(self.tokens.get(r, 0) >= 2 for r in running) and all(r in self.tokens for r in ready)
        )

    async def abort(self, *rids: str) -> None:
        """Abort these requests and wait until they have ended."""
        for rid in rids:
            self._engine.tokenizer_manager.abort_request(rid)
        await self.until(lambda: self.finish.keys() >= set(rids))

    async def end(self) -> None:
        await asyncio.wait_for(asyncio.gather(*self._tasks), timeout=120)


def run(engine: Any, scenario: Callable[[], Awaitable[None]]) -> None:
    async def guarded() -> None:
        try:
            await asyncio.wait_for(scenario(), timeout=240)
        except BaseException:
            engine.tokenizer_manager.abort_request(abort_all=True)  # the next test uses the engine, too
            raise

    engine.loop.run_until_complete(guarded())
    engine.batch_stats()  # answers after the last step is done and its trace is written


def last_events(trace: Path, rids: set[str]) -> dict[str, tuple[str, str]]:
    """Return the last change of state of each sequence: from and to."""
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    return {e["sequence"]: (e["from"], e["to"]) for e in events if e.get("sequence") in rids}


def assert_nothing_is_held(engine: Any, prompts: Prompts) -> None:
    """Check that no page and no request is held, and that the engine answers."""
    stats = engine.batch_stats()
    assert stats["free_pages"] == stats["total_pages"], "every page is given back"
    assert not engine.tokenizer_manager.rid_to_state, "no request is pending"
    new = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    answer = engine.generate(input_ids=prompts.input_ids[4], sampling_params=new)
    assert answer["meta_info"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    "aborted",
    [{"QUEUED": "4"}, {"READY": "2"}, {"RUNNING": "0"}, {"QUEUED": "5", "READY": "3", "RUNNING": "1"}],
    ids=lambda aborted: "+".join(aborted),
)
def test_an_aborted_request_ends_at_once_and_no_other_answer_changes(
    aborted: dict[str, str], engine: Any, prompts: Prompts, trace: Path, alone: Callable[..., list[list[int]]]
) -> None:
    names = [f"{'-'.join(aborted)}-{i}" for i in range(6)]
    rids = {status: names[int(index)] for status, index in aborted.items()}
    inputs = dict(zip(names, prompts.input_ids[4:10], strict=True))
    before = engine.batch_stats()["counters"].get("sequences_aborted", 0)
    streams = Streams(engine)

    async def scenario() -> None:
        for name in names:
            streams.start(inputs[name], LONG, name)
        await streams.until_in_states(running=names[:2], ready=names[2:4])
        await streams.abort(*rids.values())
        assert streams.finish.keys() == set(rids.values()), "no other request has ended yet"
        await streams.end()

    run(engine, scenario)
    assert {streams.finish[rid]["type"] for rid in rids.values()} == {"abort"}
    assert last_events(trace, set(rids.values())) == {rid: (status, "ABORTED") for status, rid in rids.items()}
    assert engine.batch_stats()["counters"]["sequences_aborted"] == before + len(rids)
    for name in names:
        (whole,) = alone(engine, inputs[name], LONG)
        generated = streams.output_ids[name] or []
        assert generated == (whole[: len(generated)] if name in rids.values() else whole)
    assert_nothing_is_held(engine, prompts)


@pytest.mark.parametrize(
    ("aborted", "status"),
    [([0], "RUNNING"), ([1], "RUNNING"), ([3], "READY"), ([2, 3], "READY"), ([0, 1, 2, 3], None)],
    ids=str,
)
def test_other_choices_of_an_aborted_choice_go_on_unchanged(
    aborted: list[int],
    status: str | None,
    engine: Any,
    prompts: Prompts,
    trace: Path,
    alone: Callable[..., list[list[int]]],
) -> None:
    prompt, name = prompts.input_ids[8], f"choices-{'-'.join(map(str, aborted))}"
    choices = [f"{name}_{i}" for i in range(4)]
    rids = [choices[i] for i in aborted]
    streams = Streams(engine)

    async def scenario() -> None:
        streams.start(prompt, {**SAMPLED, "n": 4}, name)
        await streams.until_in_states(running=choices[:2], ready=choices[2:])
        await streams.abort(*rids)
        assert streams.finish.keys() == set(rids), "no other choice has ended yet"
        await streams.end()

    run(engine, scenario)
    assert [streams.finish[rid]["type"] for rid in choices] == ["abort" if rid in rids else "length" for rid in choices]
    if status is not None:
        assert last_events(trace, set(rids)) == dict.fromkeys(rids, (status, "ABORTED"))
    for rid, whole in zip(choices, alone(engine, prompt, {**SAMPLED, "n": 4}), strict=True):
        generated = streams.output_ids[rid]
        assert generated == (whole[: len(generated)] if rid in rids else whole)
    assert_nothing_is_held(engine, prompts)


@pytest.mark.parametrize("aborted", [[0], [1], [0, 1, 2]], ids=str)
def test_aborting_choices_in_the_queue_changes_no_other_choice(
    aborted: list[int], engine: Any, prompts: Prompts, trace: Path, alone: Callable[..., list[list[int]]]
) -> None:
    """The cases: the leader, which would have computed the prompt for all; another choice; all of them."""
    prompt, name = prompts.input_ids[8], f"queued-{'-'.join(map(str, aborted))}"
    choices, busy = [f"{name}_{i}" for i in range(3)], [f"{name}-busy-{i}" for i in range(4)]
    rids = [choices[i] for i in aborted]
    streams = Streams(engine)

    async def scenario() -> None:
        for rid in busy:
            streams.start(prompts.input_ids[5], LONG, rid)
        await streams.until_in_states(running=busy[:2], ready=busy[2:])
        streams.start(prompt, {**SAMPLED, "n": 3}, name)
        await asyncio.sleep(0)
        await engine.tokenizer_manager.get_internal_state()  # answers after the choices have arrived
        await streams.abort(*rids)
        await streams.end()

    run(engine, scenario)
    assert last_events(trace, set(rids)) == dict.fromkeys(rids, ("QUEUED", "ABORTED"))
    for rid, whole in zip(choices, alone(engine, prompt, {**SAMPLED, "n": 3}), strict=True):
        if rid not in rids:
            assert streams.output_ids[rid] == whole
    assert_nothing_is_held(engine, prompts)


def test_abort_all_ends_requests_in_every_state(engine: Any, prompts: Prompts) -> None:
    streams = Streams(engine)

    async def scenario() -> None:
        streams.start(prompts.input_ids[8], {**SAMPLED, "n": 3}, "all-choices")
        await streams.until(lambda: len(streams.tokens) == 3)
        for i in range(4):
            streams.start(prompts.input_ids[5], LONG, f"all-{i}")
        await asyncio.sleep(0)
        await engine.tokenizer_manager.get_internal_state()
        engine.tokenizer_manager.abort_request(abort_all=True)
        await streams.end()

    run(engine, scenario)
    assert [reason["type"] for reason in streams.finish.values()] == ["abort"] * 7
    assert_nothing_is_held(engine, prompts)
