"""Owns a fork server: a process that has imported what engine processes need and forks them, which saves seconds.

A program that makes an engine has threads, so that forking from it is not safe. Its fork server is a process of
multiprocessing's, which has one thread and runs nothing. Later engines use it too, while the environment is that in
which its libraries were imported. It lives as long as the program, or until another server replaces it and its
processes have ended. Its processes share the memory of imported modules until they write to it.

What the server imports must start no thread and must not initialise CUDA: no process with either can be forked.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import get_spawning_popen
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from types import MappingProxyType
from typing import Any

import psutil

from sgl_batch.sglang_adapter.process_title import find_title

# The modules that the server imports first and last.
_BEFORE_IMPORTS = "sgl_batch.sglang_adapter.fork_server_beginning"
_AFTER_IMPORTS = "sgl_batch.sglang_adapter.fork_server_process"
# Variables that change from engine to engine; no library reads them when it is imported.
_CHANGING = frozenset(
    {"COLUMNS", "LINES", "OLDPWD", "PWD", "PYTEST_CURRENT_TEST", "SGLANG_RUN_ID", "TORCHINDUCTOR_CACHE_DIR"}
)
# Beginnings of variables of a GPU's libraries, which SGLang sets when an engine starts. A fork server has no GPU.
_OF_GPUS = ("CUDA_", "CUTE_DSL_", "DG_JIT_", "NCCL_", "TLLM_", "TRTLLM_")
_STREAMS = (1, 2)


class _Server:
    """A fork server, and what its libraries found when they were imported: variables, and the cores of this process."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str]) -> None:
        self.environment, self.cores = _lasting(environment), os.sched_getaffinity(0)
        self.owner = os.getpid()
        self.server = forkserver.ForkServer()
        self.server.set_forkserver_preload([_BEFORE_IMPORTS, *modules, _AFTER_IMPORTS])

    def leave(self) -> None:
        """Stop using the server: it ends when its processes have ended."""
        server: Any = self.server
        if server._forkserver_pid is None:
            return
        os.close(server._forkserver_alive_fd)
        threading.Thread(target=os.waitpid, args=(server._forkserver_pid, 0), name="fork server", daemon=True).start()


class _Servers:
    """The fork servers that this program uses: the last one, or all of them."""

    def __init__(self) -> None:
        self._in_use: list[_Server] = []
        self.keeps_all = False

    def of(self, environment: Mapping[str, str], modules: Sequence[str]) -> forkserver.ForkServer:
        """Return the server of an environment. A new server imports `modules` when it starts."""
        # A process that was forked from another one has that one's servers as numbers of processes, not as children.
        self._in_use = [one for one in self._in_use if one.owner == os.getpid()]
        lasting, cores = _lasting(environment), os.sched_getaffinity(0)
        found = next((one for one in self._in_use if one.environment == lasting and one.cores == cores), None)
        if found is None:
            if not self.keeps_all:
                self.leave_all_but(0)
            found = _Server(environment, modules)
            self._in_use.append(found)
        return found.server

    def leave_all_but(self, last: int) -> None:
        """Stop using all servers but the `last` newest ones."""
        left = self._in_use[: len(self._in_use) - last]
        del self._in_use[: len(left)]
        for server in left:
            server.leave()


class _ParentsServer(forkserver.ForkServer):
    """The server that forked this process."""

    def __init__(self, address: str, alive_fd: int) -> None:
        super().__init__()
        self._forkserver_address, self._forkserver_alive_fd = address, alive_fd

    def ensure_running(self) -> None:
        """Start nothing: the server runs as long as its processes."""
        resource_tracker.ensure_running()


_own = _Servers()
_parents: _ParentsServer | None = None


@contextmanager
def served_by_fork_server(modules: Sequence[str]) -> Iterator[None]:
    """Inside, multiprocessing's start method "forkserver" uses the server that has imported `modules`.

    The first use starts the server. A use in another environment starts another one, because libraries read the
    environment when they are imported.
    """
    server = _parents or _own.of(os.environ, modules)
    connect = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = server.connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = connect


def begin(modules: Sequence[str]) -> None:
    """Start the server of this environment, which then imports `modules` while this process goes on."""
    _own.of(os.environ, modules).ensure_running()


@contextmanager
def keeping_servers() -> Iterator[None]:
    """Inside, keep the server of every environment for a return to it, because a new one takes many seconds.

    For programs that change the environment and change it back. Outside, only the last server is kept.
    """
    _own.keeps_all = True
    try:
        yield
    finally:
        _own.keeps_all = False
        _own.leave_all_but(1)


def init_forked_process() -> bool:
    """Prepare a process that a fork server has forked; return whether this is one. Call it first in such a process.

    The process is a child of the server, not of the process that requested it. From now on a thread kills it when the
    requesting process ends, and psutil reports that process as its parent: SGLang's processes send a signal there when
    they fail.
    """
    global _own, _parents
    if forkserver.get_inherited_fds() is None:
        return False
    of_server: Any = forkserver.get_inherited_fds.__self__  # type: ignore[attr-defined]
    _own, _parents = _Servers(), _ParentsServer(of_server._forkserver_address, of_server._forkserver_alive_fd)
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is no child process"
    requester, parent_of = psutil.Process(parent.pid), psutil.Process.parent
    psutil.Process.parent = lambda process: requester if process.pid == os.getpid() else parent_of(process)
    threading.Thread(target=_end_with, args=(parent,), name="parent watch", daemon=True).start()
    return True


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


class CallerEnvironment:
    """The streams and environment variables of the process that requests another from the fork server.

    A forked process has the server's output and error streams, and the server's values of variables that change; this
    object carries those of the requesting process to it.
    """

    def __init__(self, streams: tuple[Any, ...] = (), variables: Mapping[str, str] = MappingProxyType({})) -> None:
        self._streams, self._variables = streams, variables

    def __reduce__(self) -> tuple[Any, ...]:
        if getattr(get_spawning_popen(), "method", None) != "forkserver":  # other children inherit them
            return CallerEnvironment, ()
        streams = tuple(DupFd(number) for number in _STREAMS)
        return CallerEnvironment, (streams, {key: value for key, value in os.environ.items() if _changes(key)})

    def take(self) -> None:
        """Use the carried streams and variables in this process from now on."""
        find_title()
        os.environ.update(self._variables)
        for number, sent in zip(_STREAMS, self._streams, strict=False):
            descriptor = sent.detach()
            os.dup2(descriptor, number)
            os.close(descriptor)


def _lasting(environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if not _changes(key)}


def _changes(variable: str) -> bool:
    return variable in _CHANGING or variable.startswith(_OF_GPUS)
