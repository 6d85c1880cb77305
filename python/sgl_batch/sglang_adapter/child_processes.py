"""Owns how SGLang's child processes start: their environment, and forked from this process, from a fork server, or
anew.

It does not import SGLang: most of a child's environment must be set before its libraries are imported, and a forked
child has this process's libraries.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

from sgl_batch.sglang_adapter import fork_server
from sgl_batch.sglang_adapter.bootstrap import collector_paused
from sgl_batch.sglang_adapter.names import CPU_PLATFORM
from sgl_batch.sglang_adapter.process_title import find_title

FORK, FORKSERVER, SPAWN = "fork", "forkserver", "spawn"

# How threads of operators wait: they sleep, because the engine's other processes share the cores, and spinning threads
# lose most of their time while one of them has no core. Only for some 50 us do they spin first, as long as there is a
# core for each: the calls of a recorded pass follow each other in less, and to wake a thread takes as long.
THREAD_ENVIRONMENT = MappingProxyType({"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"})
_CPU_ENVIRONMENT = {
    **THREAD_ENVIRONMENT,
    # Python's resource tracker warns about semaphores of killed processes, and removes them itself.
    "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",
    # oneDNN compiles a kernel for every number of rows, and oneDNN and torch both keep the last 1,024 kernels: half a
    # gigabyte in a long run. A decode step needs a few dozen.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
}
# numpy's BLAS starts threads when it is imported, and a process with threads cannot be forked safely. We do not compute
# with it.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
# What SGLang sets before it starts processes, for arguments that are not given.
_SET_BY_SGLANG = {
    "SGLANG_DISABLE_OUTLINES_DISK_CACHE": "0",
    "SGLANG_ENABLE_CP_V2": "True",
    "SGLANG_ENABLE_DETERMINISTIC_INFERENCE": "0",
    "SGLANG_ENABLE_TORCH_COMPILE": "0",
    "SGLANG_USE_CUDA_IPC_TRANSPORT": "0",
}


@contextmanager
def platform(name: str | None) -> Iterator[None]:
    """Start child processes inside this block with SGLang's platform `name`; None leaves the environment as it is.

    With a name, they also get defaults for a CPU for variables that the environment does not set. The parent's
    environment is restored.
    """
    if name is None:
        yield
        return
    with environment({"SGLANG_PLATFORM": name}, _CPU_ENVIRONMENT):
        yield


@contextmanager
def template(device: str | None) -> Iterator[bool]:
    """Import torch and SGLang inside this block, in a program of ours, so that its children can be forked from it.

    Yields whether they can be. They cannot with a GPU (unless `device` is "cpu"), or if torch was imported before, in
    another environment. Then a child starts anew and imports everything itself.
    """
    if "torch" in sys.modules:
        yield False
        return
    with collector_paused(), environment({"SGLANG_PLATFORM": CPU_PLATFORM}, {**_CPU_ENVIRONMENT, **_ONE_THREAD}):
        import torch

        on_cpu = device == "cpu" or not torch.cuda.is_available()
        if on_cpu:
            # The collector will leave alone what is imported: it would write to every object that it visits, and so
            # copy the memory that is shared with forked children.
            yield True
    if not on_cpu:
        yield False


@contextmanager
def environment(settings: Mapping[str, str], defaults: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Set `settings` in the environment inside the block, and `defaults` for variables that it does not set."""
    find_title()
    before = dict(os.environ)
    os.environ.update({**defaults, **{key: before[key] for key in defaults if key in before}, **settings})
    try:
        yield
    finally:
        for key in (*settings, *defaults):
            if key in before:
                os.environ[key] = before[key]
            else:
                os.environ.pop(key, None)


@contextmanager
def start_method_of(process_function: Callable[..., Any]) -> Iterator[None]:
    """Inside, processes of `process_function` start by the `start_method` of its owner.

    A process that has threads is not forked: the fork would have all locks but none of the threads. The fork server has
    no threads; it imports the owner's `preloaded` modules (default: the owner's own) once for all processes.
    """
    owner = getattr(process_function, "__self__", process_function)
    start_method = getattr(owner, "start_method", SPAWN)
    with ExitStack() as inside:
        if start_method == FORKSERVER:
            inside.enter_context(environment({}, _ONE_THREAD))
            modules = getattr(owner, "preloaded", (type(owner).__module__,))
            inside.enter_context(fork_server.served_by_fork_server(modules))
        elif start_method != FORK or not is_single_threaded():
            yield
            return
        before = multiprocessing.get_start_method()
        multiprocessing.set_start_method(start_method, force=True)
        try:
            yield
        finally:
            multiprocessing.set_start_method(before, force=True)


def begin_fork_server(name: str, modules: Sequence[str]) -> None:
    """Start the fork server of processes on SGLang's platform `name` now; it imports `modules` by itself.

    It serves engines whose arguments leave SGLang's environment at its defaults; others start another one.
    """
    with platform(name), environment({}, {**_ONE_THREAD, **_SET_BY_SGLANG}):
        fork_server.begin(modules)


def is_single_threaded() -> bool:
    """Return whether this process has one thread only, counting the threads of libraries."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False
