"""Owns the process of one instance on a node: a Ray actor around an InstanceServer. It imports no Ray.

    ray.remote(InstanceActor).options(max_concurrency=MAX_CONCURRENCY, ...).remote(encode(settings))

Its methods take and give bytes (`messages`). The engine starts with the first call. The process ends with its raylet.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from sgl_batch.api.supervisor import EngineSupervisor
from sgl_batch.control_plane.instances.http_messages import Control, HttpCall, HttpMore, HttpRequest
from sgl_batch.control_plane.instances.instance_server import InstanceServer
from sgl_batch.control_plane.instances.messages import Lot, Poll, decode, encode
from sgl_batch.control_plane.instances.service_state import ServiceState
from sgl_batch.control_plane.instances.spool import Spool
from sgl_batch.engine.engine_process import ENGINE_PROGRAM
from sgl_batch.errors import ConfigError
from sgl_batch.owned_directory import OwnedDirectory, remove_abandoned

logger = logging.getLogger(__name__)

MAX_CONCURRENCY = 1000  # long polls and requests over HTTP hold a call each
_LOOK_EVERY_S = 0.2
_LONGEST_DIRECTORY = 80  # sockets lie in it, and the kernel takes 107 characters
_KEPT_LOGS = 8
_REPLY_WITHIN_S = 0.2
_THREADS = "OMP_NUM_THREADS"


class InstanceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance's process is made with.

    Attributes:
        engine_argv: The engine's flags.
        directory: On its node: spool and logs. Each instance has its own; its incarnations share it.
        incarnation: Higher than those before.
        cores: The numbers of the cores that the engine may use; none: all.
        stall_s, restart_stalled: As for a server's engine.
        environment: Variables of the engine. OMP_NUM_THREADS, which Ray sets, is dropped where it is not here: the
            engine takes as many threads as it has cores.
        program: How the engine's process is started; empty: the node's own Python and this package.
    """

    engine_argv: tuple[str, ...]
    directory: str
    incarnation: int
    cores: tuple[int, ...] = ()
    stall_s: float = 0.0
    restart_stalled: bool = False
    environment: dict[str, str] = {}
    program: tuple[str, ...] = ()


class TakeBack(msgspec.Struct, frozen=True, array_like=True):
    """Asks for lines back. `call`: names the call, so that one that is repeated takes nothing more."""

    call: str
    count: int
    among: tuple[str, ...] = ()


class Keys(msgspec.Struct, frozen=True, array_like=True):
    """The keys of lines."""

    keys: tuple[str, ...]


class Taken(msgspec.Struct, frozen=True, array_like=True):
    """Whether lines were taken."""

    is_taken: bool


class Presence(msgspec.Struct, frozen=True, kw_only=True):
    """Who answers a ping. `log`: the file of the engine's log on its node."""

    incarnation: int
    pid: int
    host: str
    log: str


class InstanceActor:
    """The actor. Raises ConfigError from its constructor where it cannot work: a ray.remote class reports that.

    Args:
        settings: An encoded InstanceSettings.
    """

    def __init__(self, settings: bytes) -> None:
        self._settings = made = decode(settings, InstanceSettings)
        os.umask(0o077)  # its files hold requests and answers
        directory = Path(made.directory)
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            _check_owner(directory)
            self._log = _log_to(directory, made.incarnation)
        except OSError as error:
            raise ConfigError(f"the directory of an instance {directory} cannot be used: {error}") from error
        _hold_to(made.cores)
        os.environ.pop(_THREADS, None)
        os.environ.update(made.environment)
        remove_abandoned("sgl-batch-")
        self._owned = OwnedDirectory.make("sgl-batch-instance-")
        _check_length(self._owned.path)
        threading.Thread(target=self._end_with, args=(os.getppid(),), daemon=True, name="raylet").start()
        self._spool = Spool(directory / "spool", made.incarnation)
        self._server: InstanceServer | None = None
        self._last_taken: tuple[str, bytes] = ("", b"")

    def _serving(self) -> InstanceServer:
        if self._server is None:
            made = self._settings
            supervisor = EngineSupervisor(
                (*(made.program or ENGINE_PROGRAM), *made.engine_argv),
                self._owned.path,
                stall_s=made.stall_s,
                restart_stalled=made.restart_stalled,
                request_logs=Path(made.directory) / "request_logs",
            )
            where = f"{self._log} on {socket.gethostname()}"
            self._server = InstanceServer(made.incarnation, supervisor, self._spool, log=where)
            self._server.start()
        return self._server

    async def ping(self, data: bytes = b"") -> bytes:
        """Return a Presence."""
        self._serving()
        return encode(
            Presence(
                incarnation=self._settings.incarnation, pid=os.getpid(), host=socket.gethostname(), log=str(self._log)
            )
        )

    async def submit(self, data: bytes) -> bytes:
        """Take a Lot, and return a Taken."""
        return encode(Taken(await self._serving().submit(decode(data, Lot))))

    async def poll(self, data: bytes) -> bytes:
        """Take a Poll, and return a Report."""
        return encode(await self._serving().poll(decode(data, Poll)))

    async def take_back(self, data: bytes) -> bytes:
        """Take a TakeBack, and return Keys."""
        asked = decode(data, TakeBack)
        if asked.call != self._last_taken[0]:
            self._last_taken = asked.call, encode(Keys(await self._serving().take_back(asked.count, asked.among)))
        return self._last_taken[1]

    async def cancel(self, data: bytes) -> bytes:
        """Take Keys, and return nothing."""
        await self._serving().cancel(decode(data, Keys).keys)
        return b""

    async def known(self, data: bytes = b"") -> bytes:
        """Return Keys."""
        return encode(Keys(await self._serving().known()))

    async def stats(self, data: bytes = b"") -> bytes:
        """Return a Reading."""
        return encode(await self._serving().stats())

    async def adopt(self, data: bytes) -> bytes:
        """Take a ServiceState, and return nothing."""
        await self._serving().adopt(decode(data, ServiceState))
        return b""

    async def control(self, data: bytes) -> bytes:
        """Take a Control, and return a Controlled."""
        return encode(await self._serving().control(decode(data, Control)))

    async def http(self, data: bytes) -> bytes:
        """Take an HttpRequest, and return an HttpPart."""
        return encode(await self._serving().http(decode(data, HttpRequest)))

    async def http_more(self, data: bytes) -> bytes:
        """Take an HttpMore, and return an HttpPart."""
        return encode(await self._serving().http_more(decode(data, HttpMore)))

    async def http_end(self, data: bytes) -> bytes:
        """Take an HttpCall, and return nothing."""
        await self._serving().http_end(decode(data, HttpCall).call)
        return b""

    async def stop(self, data: bytes = b"") -> bytes:
        """End the engine, return nothing, and end this process."""
        await self._serving().stop()
        self._owned.remove()
        asyncio.get_running_loop().call_later(_REPLY_WITHIN_S, os._exit, 0)
        return b""

    def _end_with(self, raylet: int) -> None:
        """End the engine and this process when the raylet is gone: what has no node any more must not compute."""
        while os.getppid() == raylet:
            time.sleep(_LOOK_EVERY_S)
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        self._owned.remove()
        os._exit(1)


def _log_to(directory: Path, incarnation: int) -> Path:
    """Send all output of this process and of its children to a file, and return it. Old files are removed."""
    for old in sorted(directory.glob("engine-*.log"))[: -_KEPT_LOGS + 1]:
        old.unlink(missing_ok=True)
    path = directory / f"engine-{incarnation:08d}.log"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    logging.basicConfig(
        handlers=[logging.FileHandler(path)], level=logging.INFO, format="[%(asctime)s] %(message)s", force=True
    )
    return path


def _check_owner(directory: Path) -> None:
    """Raise ConfigError for a directory of another user, who could read requests in it or put answers there."""
    for path in (directory, directory.parent):
        owner = path.lstat().st_uid
        if owner not in (0, os.geteuid()):
            raise ConfigError(
                f"the directory of an instance {path} on {socket.gethostname()} belongs to user {owner}, not to user "
                f"{os.geteuid()}: remove it, or start Ray there with another TMPDIR"
            )


def _hold_to(cores: tuple[int, ...]) -> None:
    """Hold all threads of this process, and with them its children, to these cores. Raises ConfigError."""
    if not cores:
        return
    for thread in os.listdir("/proc/self/task"):
        try:
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), cores)
        except OSError as error:
            raise ConfigError(f"the cores {sorted(cores)} cannot be used on {socket.gethostname()}: {error}") from error


def _check_length(directory: Path) -> None:
    if len(str(directory)) > _LONGEST_DIRECTORY:
        raise ConfigError(
            f"the directory of temporary files {directory} on {socket.gethostname()} has a name of "
            f"{len(str(directory))} characters, too long for the names of sockets in it: start Ray there with a TMPDIR "
            f"with which it has at most {_LONGEST_DIRECTORY}"
        )
