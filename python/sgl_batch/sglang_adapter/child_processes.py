"""Owns how SGLang's child processes come into being: in which environment, and forked from this process, from a fork
server, or started anew.

It decides nothing about what runs in them. It imports no SGLang: much of what a child finds in its environment has to
stand there before its libraries are imported, and a forked child's libraries are this process's.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

from sgl_batch.sglang_adapter import fork_server
from sgl_batch.sglang_adapter.bootstrap import collector_paused
from sgl_batch.sglang_adapter.names import CPU_PLATFORM

FORK, FORKSERVER, SPAWN = "fork", "forkserver", "spawn"

_CPU_ENVIRONMENT = {
    # Python's own tracker of semaphores tells the user of those of processes that were ended, and removes them itself.
    "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",
    # Threads wait without spinning: the engine's other processes share the cores, and threads that spin while one of
    # them is off its core lose most of the time.
    "OMP_WAIT_POLICY": "PASSIVE",
    # oneDNN compiles a kernel for every number of rows that a product ever has, and both it and torch keep the last
    # 1,024: half a gigabyte, once a long run has met them. A decode step needs a few dozen.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
}
# numpy's BLAS starts threads when it is imported, and a process with threads cannot be forked safely. Nothing here
# computes with it.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


@contextmanager
def platform(name: str | None) -> Iterator[None]:
    """Start child processes inside this block with SGLang's platform `name` (None: as the environment stands).

    With a name they also get what suits a CPU, where the environment does not say otherwise. The parent's environment
    is restored.
    """
    if name is None:
        yield
        return
    with environment({"SGLANG_PLATFORM": name}, _CPU_ENVIRONMENT):
        yield


@contextmanager
def template(device: str | None) -> Iterator[bool]:
    """Import torch and SGLang inside this block, in a program of ours: its children can then be forked from it.

    Yields whether they can: beside a GPU they cannot (unless `device` is "cpu"), nor where torch is imported already,
    in another environment. Then a child starts anew and imports everything itself.
    """
    if "torch" in sys.modules:
        yield False
        return
    with collector_paused(), environment({"SGLANG_PLATFORM": CPU_PLATFORM}, {**_CPU_ENVIRONMENT, **_ONE_THREAD}):
        import torch

        on_cpu = device == "cpu" or not torch.cuda.is_available()
        if on_cpu:
            yield True
            # What was imported stays. The collector would write to every object that it looks at, and so copy the
            # memory that is shared with forked children.
            gc.freeze()
    if not on_cpu:
        yield False


@contextmanager
def environment(settings: Mapping[str, str], defaults: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Have `settings` in the environment inside the block, and `defaults` for what it does not say."""
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
    """Processes of `process_function` start inside this block as the `start_method` of its owner says.

    Where this process has threads by now, none is forked from it: a fork has none of the threads, but all their locks.
    The fork server has none.
    """
    owner = getattr(process_function, "__self__", process_function)
    start_method = getattr(owner, "start_method", SPAWN)
    with ExitStack() as inside:
        if start_method == FORKSERVER:
            inside.enter_context(environment({}, _ONE_THREAD))
            inside.enter_context(fork_server.served_by_fork_server(type(owner).__module__))
        elif start_method != FORK or not is_single_threaded():
            yield
            return
        before = multiprocessing.get_start_method()
        multiprocessing.set_start_method(start_method, force=True)
        try:
            yield
        finally:
            multiprocessing.set_start_method(before, force=True)


def is_single_threaded() -> bool:
    """Whether this process has no thread but one, of Python's or any library's."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False
