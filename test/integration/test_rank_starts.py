"""A rank that ends while the engine starts ends the start with an error that names it, and no process is left."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from sgl_batch import Engine
from sgl_batch.distributed.rendezvous import Rendezvous
from sgl_batch.errors import ConfigError, EngineError

from .background import in_background
from .conftest import FAMILIES
from .test_ranks import ranks

pytestmark = pytest.mark.engine


class Start:
    """Watches the processes of an engine that starts. `directory`: where temporary files go."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._before = set(psutil.Process().children(recursive=True))
        self._seen: set[psutil.Process] = set()

    def look(self) -> None:
        """Remember the processes there are: one whose parent has ended is no longer found among the children."""
        self._seen.update(set(psutil.Process().children(recursive=True)) - self._before)

    def published_file(self) -> Path | None:
        """Return a file that the ranks have published for each other, if there is one."""
        return next(self._directory.glob("sgl-batch-*/*"), None)

    def first_rank(self) -> int | None:
        """Return the process id of the first rank as soon as both ranks have begun."""
        file = self.published_file()
        begun = Rendezvous(file.parent).published("pid") if file else {}
        return int(begun[0]) if len(begun) == 2 else None

    def alive(self) -> list[psutil.Process]:
        """Return the engine's processes that still run, without this program's own helper processes."""
        return [one for one in self._seen if _command(one) and not _is_helper(one)]


def _is_helper(process: psutil.Process) -> bool:
    """Return whether it is this program's resource tracker or fork server: both outlast an engine."""
    with suppress(psutil.Error):
        served = "forkserver" in _command(process) and process.ppid() == os.getpid()
        return served or "resource_tracker" in _command(process)
    return False


def _command(process: psutil.Process) -> str:
    """Return the command line of a process that runs, else an empty string."""
    try:
        return " ".join(process.cmdline()) if process.is_running() else ""
    except psutil.Error:  # it has ended, and may be a zombie
        return ""


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Start:
    directory = tmp_path_factory.mktemp("start")
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return Start(directory)


@contextmanager
def killing(start: Start, victim: Callable[[Start], int | None]) -> Iterator[None]:
    """Kill the process that `victim` names as soon as it names one."""

    # A look goes through all processes of the machine, which may take longer than what is left of the start: it has a
    # thread of its own.
    def look(over: threading.Event) -> None:
        while not over.wait(0.2):
            start.look()

    def kill(over: threading.Event) -> None:
        while not over.wait(0.005):
            pid = victim(start)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                start.look()
                return

    with in_background(look), in_background(kill):
        yield


def test_a_rank_killed_during_the_start_is_named_with_its_signal_and_no_process_is_left(
    start: Start, model_path: Callable[[str], str]
) -> None:
    message = r"^the engine did not start: rank [01] of the engine died: SIGKILL \(its process was killed\)"
    with killing(start, Start.first_rank), pytest.raises(EngineError, match=message):
        Engine(model_path=model_path(FAMILIES[0]), max_total_tokens=4096, **ranks(2)).shutdown()
    assert start.alive() == []
    assert start.published_file() is None


def test_the_error_of_a_rank_that_fails_ends_the_start_while_the_other_waits(
    start: Start, model_path: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    """The log of the start tells how far it came."""
    message = r"^rank 0 of the engine failed: .* fewer than one for each of 2 ranks"
    kwargs = {"max_total_tokens": 4096, "kv_store_bytes": 1 << 16, "log_startup": True}
    with killing(start, lambda _: None), pytest.raises(ConfigError, match=message):
        Engine(model_path=model_path(FAMILIES[0]), **ranks(2), **kwargs).shutdown()
    assert start.alive() == []
    logged = [line.split(maxsplit=4)[4] for line in capfd.readouterr().err.splitlines() if " s  " in line]
    assert {f"rank {rank} weights packed" for rank in range(2)} <= {" ".join(line.split()) for line in logged}
    assert sum(line.endswith(" MiB of weights held once for 2 ranks") for line in logged) == 2
