"""Watches the engine processes of running commands: how much they compute, and disturbs one of them."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import psutil

_ENGINE = "sgl_batch.launch_engine"
# Of a slowed engine: it stands still for half of each period.
_PERIOD_S = 0.1


@dataclass(slots=True)
class Samples:
    """The processor seconds of an engine's processes in each second of the run, by the engine's core."""

    times: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)


def engines_below(roots: Sequence[int]) -> list[psutil.Process]:
    """Return the engines that these commands run, their own process first where a command is an engine itself."""
    found: list[psutil.Process] = []
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(root)
            below = [one for one in process.children(recursive=True) if _is_engine(one)]
            found += below or [process]
    return sorted(found, key=_core)


def _is_engine(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return _ENGINE in process.cmdline()
    return False


def _core(process: psutil.Process) -> int:
    with suppress(psutil.NoSuchProcess):
        return min(process.cpu_affinity())
    return -1


def family(engine: psutil.Process) -> list[psutil.Process]:
    """Return an engine's process and all that it has started."""
    with suppress(psutil.NoSuchProcess):
        return [engine, *engine.children(recursive=True)]
    return []


@contextmanager
def _in_background(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Let a thread work until this is left, which sets the event and waits for its end."""
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def watched(roots: Sequence[int]) -> Iterator[dict[int, Samples]]:
    """Sample the engines of commands until this is left, each as a part of one core's time. Yields samples by core."""
    samples: dict[int, Samples] = {}

    def sample(stop: threading.Event) -> None:
        began, last = time.monotonic(), dict[int, float]()
        while not stop.wait(1.0):
            now = time.monotonic() - began
            for engine in engines_below(roots):
                core, used = _core(engine), sum(map(_processor_s, family(engine)))
                before = last.get(core)
                last[core] = used
                if before is not None and used >= before:
                    one = samples.setdefault(core, Samples())
                    one.times.append(round(now, 1))
                    one.busy.append(round(used - before, 3))

    with _in_background(sample):
        yield samples


def _processor_s(process: psutil.Process) -> float:
    with suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


@contextmanager
def slowed(roots: Sequence[int]) -> Iterator[None]:
    """Let the last engine of some commands stand still for half of the time, until this is left."""

    def slow(stop: threading.Event) -> None:
        engines = engines_below(roots)
        members = family(engines[-1]) if engines else []
        try:
            while not stop.wait(_PERIOD_S / 2):
                _signal(members, signal.SIGSTOP)
                if stop.wait(_PERIOD_S / 2):
                    break
                _signal(members, signal.SIGCONT)
        finally:
            _signal(members, signal.SIGCONT)

    with _in_background(slow):
        yield


def kill_last(roots: Sequence[int]) -> None:
    """Kill the last engine of some commands, with all of its processes."""
    engines = engines_below(roots)
    if engines:
        _signal(family(engines[-1]), signal.SIGKILL)


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            one.send_signal(number)
