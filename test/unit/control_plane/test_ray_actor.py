"""An instance's process holds its engine to its cores, keeps its log, and ends with its engine. Ray is not needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from scripted_worker import COMMAND

from sgl_batch.control_plane.instances.messages import encode
from sgl_batch.control_plane.instances.ray_actor import InstanceActor, InstanceSettings
from sgl_batch.errors import ConfigError

# It answers one line, asks for lines back twice with one name, and stops.
PROGRAM = """
import asyncio, json, os, pathlib, sys
import psutil
from sgl_batch.control_plane.instances.messages import Line, Lot, Poll, Report, decode, encode
from sgl_batch.control_plane.instances.ray_actor import InstanceActor, Keys, TakeBack, Taken
said = os.dup(1)
actor = InstanceActor(pathlib.Path(sys.argv[1]).read_bytes())
async def main():
    while decode(await actor.poll(encode(Poll(wait_s=0.1))), Report).phase != "ready":
        await asyncio.sleep(0.01)
    lines = [Line(key, "/v1/completions", b'{"hang":true}') for key in ("a", "b", "c")]
    lines.append(Line("x", "/v1/completions", b'{"x":1}'))
    assert decode(await actor.submit(encode(Lot(tuple(lines)))), Taken).is_taken
    while not (report := decode(await actor.poll(encode(Poll(wait_s=1.0))), Report)).answers:
        pass
    body = json.loads(report.answers[0].body)
    engine = psutil.Process(body["pid"])
    taken = [decode(await actor.take_back(encode(TakeBack(call, 1))), Keys).keys for call in ("1", "1", "2")]
    found = {"pid": engine.pid, "cores": engine.cpu_affinity(), "threads": engine.environ().get("OMP_NUM_THREADS"),
             "word": engine.environ().get("WORD"), "taken": taken}
    print("to the log", flush=True)
    os.write(said, json.dumps(found).encode())
    await actor.stop()
    await asyncio.sleep(60)
asyncio.run(main())
"""


def settings(directory: Path, **fields: object) -> bytes:
    return encode(InstanceSettings(**{"engine_argv": (), "directory": str(directory), "incarnation": 3, **fields}))


def test_the_engine_runs_on_its_cores_and_ends_with_the_process_which_keeps_a_log(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    asked = tmp_path / "settings"
    asked.write_bytes(settings(tmp_path / "i0", cores=(core,), program=COMMAND, environment={"WORD": "w"}))
    argv = [sys.executable, "-c", PROGRAM, str(asked)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": "/tmp"}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env=environment)
    log = (tmp_path / "i0" / "engine-00000003.log").read_text()
    assert done.returncode == 0, log + done.stderr
    found = json.loads(done.stdout)
    assert not psutil.pid_exists(found.pop("pid"))
    assert found == {"cores": [core], "threads": None, "word": "w", "taken": [["c"], ["c"], ["b"]]}
    assert "to the log" in log
    assert "the engine is ready" in log


@pytest.fixture
def same_umask() -> Iterator[None]:
    """Restore the umask, which an actor sets for its process."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.mark.usefixtures("same_umask")
def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    if os.getuid() == 0:  # what root owns is trusted
        os.chown(tmp_path, 1234, -1)
    with pytest.raises(ConfigError, match="belongs to user"):
        InstanceActor(settings(tmp_path / "i0"))


@pytest.mark.usefixtures("same_umask")
def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        InstanceActor(settings(tmp_path / "file" / "i0"))
