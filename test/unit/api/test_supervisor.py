"""After a death another engine starts, unless none can run; no engine is left when the server is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from scripted_worker import COMMAND

from sgl_batch.api import supervisor as supervisor_module
from sgl_batch.api.supervisor import EngineSupervisor
from sgl_batch.engine import engine_process as process_module
from sgl_batch.errors import EngineError

WITHIN_S = 20


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits for restarts and statistics, which suit a large engine."""
    monkeypatch.setattr("sgl_batch.api.restart_policy._FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(supervisor_module, "_STATS_EVERY_S", 0.02)


def supervise(
    directory: Path,
    scenario: Callable[[EngineSupervisor], Awaitable[None]],
    *flags: str,
    stall_s: float = 0.0,
    restart_stalled: bool = False,
) -> None:
    """Run a scenario over a supervisor of scripted processes, and check that it leaves nothing behind."""

    async def run() -> None:
        supervisor = EngineSupervisor((*COMMAND, *flags), directory, stall_s=stall_s, restart_stalled=restart_stalled)
        supervisor.start()
        try:
            await asyncio.wait_for(scenario(supervisor), WITHIN_S)
        finally:
            await supervisor.stop()

    others = set(psutil.Process().children(recursive=True))
    asyncio.run(run())
    assert os.listdir(directory) == []
    assert set(psutil.Process().children(recursive=True)) <= others


async def phase_is(supervisor: EngineSupervisor, phase: str) -> None:
    while supervisor.state.phase != phase:
        await asyncio.sleep(0.005)


def test_an_engine_that_is_ready_answers(tmp_path: Path) -> None:
    async def scenario(supervisor: EngineSupervisor) -> None:
        assert supervisor.current() is None
        assert supervisor.http is None
        engine = await supervisor.available()
        assert supervisor.current() is engine
        assert engine.served_model_names == ("tiny",)
        assert (await engine.respond("/v1/completions", {"x": 1})).body["x"] == 1
        assert supervisor.state.phase == "ready"
        assert supervisor.http is not None

    supervise(tmp_path, scenario)


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ({"exit": 7}, "exit code 7 while it served"),
        ({"die": "rank 1 died"}, "rank 1 died"),
    ],
)
def test_a_line_in_flight_gets_the_cause_of_the_engines_death_and_another_engine_starts(
    tmp_path: Path, deed: dict[str, object], words: str
) -> None:
    async def scenario(supervisor: EngineSupervisor) -> None:
        first = await supervisor.available()
        waiting = asyncio.ensure_future(first.respond("/v1/completions", {"hang": True}))
        with pytest.raises(EngineError, match=words):
            await first.respond("/v1/completions", deed)
        with pytest.raises(EngineError, match=words):
            await waiting
        second = await supervisor.available(other_than=first)
        assert second is not first
        assert (await second.respond("/v1/completions", {"x": 1})).status_code == 200
        assert supervisor.state.restarts == 1

    supervise(tmp_path, scenario)


def test_a_killed_engine_is_named_by_its_signal(tmp_path: Path) -> None:
    async def scenario(supervisor: EngineSupervisor) -> None:
        engine = await supervisor.available()
        pid = (await engine.respond("/v1/completions", {})).body["pid"]
        waiting = asyncio.ensure_future(engine.respond("/v1/completions", {"hang": True}))
        await asyncio.sleep(0)
        os.kill(int(str(pid)), signal.SIGKILL)
        with pytest.raises(EngineError, match="SIGKILL while it served"):
            await waiting

    supervise(tmp_path, scenario)


def test_a_stop_while_a_dead_engine_is_cleared_away_waits_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clearing, may_end = asyncio.Event(), asyncio.Event()
    whole = process_module.group_ended

    async def slowly(group: int, within_s: float) -> list[int]:
        clearing.set()
        await may_end.wait()
        return await whole(group, within_s)

    monkeypatch.setattr(process_module, "group_ended", slowly)

    async def scenario(supervisor: EngineSupervisor) -> None:
        engine = await supervisor.available()
        dying = asyncio.ensure_future(engine.respond("/v1/completions", {"exit": 3}))
        await clearing.wait()
        stopping = asyncio.ensure_future(supervisor.stop())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not stopping.done(), "a killed process may still run"
        may_end.set()
        await stopping
        dying.cancel()
        assert os.listdir(tmp_path) == []

    supervise(tmp_path, scenario)


@pytest.mark.parametrize("ends", ["is stopped", "dies"])
def test_nothing_of_an_engine_runs_any_more_when_it_has_ended(tmp_path: Path, ends: str) -> None:
    async def scenario(supervisor: EngineSupervisor) -> None:
        engine = await supervisor.available()
        answer = await engine.respond("/v1/completions", {"child": 1 << 29})
        child = psutil.Process(int(str(answer.body["child"])))
        if ends == "dies":
            with pytest.raises(EngineError):
                await engine.respond("/v1/completions", {"exit": 3})
        else:
            await supervisor.stop()
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE

    supervise(tmp_path, scenario)


def test_an_engine_that_cannot_start_is_given_up_with_its_message(tmp_path: Path) -> None:
    async def scenario(supervisor: EngineSupervisor) -> None:
        await phase_is(supervisor, "failed")
        assert supervisor.state.message == "not started again: no memory for 3 layers"
        assert supervisor.state.restarts == 2
        assert not supervisor.is_refused

    supervise(tmp_path, scenario, "--fail", "no memory for 3 layers")


def test_an_engine_that_ends_without_a_message_is_given_up_with_its_exit_code(tmp_path: Path) -> None:
    async def scenario(supervisor: EngineSupervisor) -> None:
        await phase_is(supervisor, "failed")
        assert "exit code 9 before it was ready" in (supervisor.state.message or "")

    supervise(tmp_path, scenario, "--exit", "9")


def test_a_refused_command_line_is_not_tried_twice(tmp_path: Path) -> None:
    async def scenario(supervisor: EngineSupervisor) -> None:
        await phase_is(supervisor, "failed")
        assert supervisor.is_refused
        assert supervisor.state.restarts == 0

    supervise(tmp_path, scenario, "--refuse", "no such flag")


def test_a_hung_engine_is_called_stalled_until_it_goes_on(tmp_path: Path) -> None:
    async def scenario(supervisor: EngineSupervisor) -> None:
        engine = await supervisor.available()
        waiting = asyncio.ensure_future(engine.respond("/v1/completions", {"hang": True}))
        await phase_is(supervisor, "stalled")
        assert "has made no progress" in (supervisor.state.message or "")
        waiting.cancel()
        await phase_is(supervisor, "ready")
        assert supervisor.current() is engine

    supervise(tmp_path, scenario, stall_s=0.2)


def test_a_paused_engine_does_not_count_as_hung_until_it_resumes(tmp_path: Path) -> None:
    async def scenario(supervisor: EngineSupervisor) -> None:
        engine = await supervisor.available()
        await engine.respond("/v1/completions", {"pause": True})
        while not supervisor.view.is_paused:
            await asyncio.sleep(0.005)
        waiting = asyncio.ensure_future(engine.respond("/v1/completions", {"hang": True}))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(phase_is(supervisor, "stalled"), 0.6)
        going_on = asyncio.ensure_future(engine.respond("/v1/completions", {"pause": False, "hang": True}))
        await phase_is(supervisor, "stalled")
        waiting.cancel()
        going_on.cancel()

    supervise(tmp_path, scenario, stall_s=0.2)


def test_a_hung_engine_is_replaced_where_that_is_asked_for(tmp_path: Path) -> None:
    async def scenario(supervisor: EngineSupervisor) -> None:
        engine = await supervisor.available()
        with pytest.raises(EngineError, match="SIGKILL"):
            await engine.respond("/v1/completions", {"hang": True})
        assert await supervisor.available(other_than=engine) is not engine

    supervise(tmp_path, scenario, stall_s=0.2, restart_stalled=True)


FRONT = """
import asyncio, pathlib, sys
sys.path.insert(0, sys.argv[1])
from scripted_worker import COMMAND
from sgl_batch.api.supervisor import EngineSupervisor
async def main():
    supervisor = EngineSupervisor(COMMAND, pathlib.Path(sys.argv[2]), stall_s=0, restart_stalled=False)
    supervisor.start()
    engine = await supervisor.available()
    print((await engine.respond("/v1/completions", {})).body["pid"], flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_an_engine_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", FRONT, str(Path(__file__).parent), str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        engine = psutil.Process(int(front.stdout.readline()))
        front.kill()
    deadline = time.monotonic() + WITHIN_S
    while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the engine's process still runs"
        time.sleep(0.01)


def test_the_supervisor_imports_neither_torch_nor_sglang() -> None:
    code = (
        "import sys, sgl_batch.launch_server, sgl_batch.api.front; "
        "sys.exit(sorted({'torch', 'sglang', 'transformers', 'zmq', 'ray'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
