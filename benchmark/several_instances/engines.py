"""Watches the engine processes of running commands: how much they compute, and disturbs one of them."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
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


class Watch:
    """Samples the engines of commands until it is left, each as a part of one core's time."""

    def __init__(self, roots: Sequence[int]) -> None:
        self.samples: dict[int, Samples] = {}
        self._roots, self._stop = roots, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        began, last = time.monotonic(), dict[int, float]()
        while not self._stop.wait(1.0):
            now = time.monotonic() - began
            for engine in engines_below(self._roots):
                core, used = _core(engine), sum(map(_processor_s, family(engine)))
                before = last.get(core)
                last[core] = used
                if before is not None and used >= before:
                    one = self.samples.setdefault(core, Samples())
                    one.times.append(round(now, 1))
                    one.busy.append(round(used - before, 3))


def _processor_s(process: psutil.Process) -> float:
    with suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


class Slowed:
    """Lets the last engine of some commands stand still for half of the time, until it is left."""

    def __init__(self, roots: Sequence[int]) -> None:
        self._roots, self._stop = roots, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Slowed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        engines = engines_below(self._roots)
        members = family(engines[-1]) if engines else []
        try:
            while not self._stop.wait(_PERIOD_S / 2):
                _signal(members, signal.SIGSTOP)
                if self._stop.wait(_PERIOD_S / 2):
                    break
                _signal(members, signal.SIGCONT)
        finally:
            _signal(members, signal.SIGCONT)


def kill_last(roots: Sequence[int]) -> None:
    """Kill the last engine of some commands, with all of its processes."""
    engines = engines_below(roots)
    if engines:
        _signal(family(engines[-1]), signal.SIGKILL)


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            one.send_signal(number)
