"""Finds the processes of instances, and those that outlive what they belong to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil

WITHIN_S = 5.0
ENGINE_PARTS = ("host", "scheduler", "detokenizer")
_ACTOR, _HOST = "ray::InstanceActor", "sgl_batch.launch_engine"


def actors() -> list[psutil.Process]:
    """Return the processes of the instances on the harness's Ray."""
    return _ours(lambda words: words.startswith(_ACTOR))


def engine_processes() -> list[psutil.Process]:
    """Return the actors, and the processes of all engines, on the harness's Ray."""
    return _ours(_is_instance)


def is_instance(process: psutil.Process) -> bool:
    """Return whether a process is an actor, or one of an engine."""
    with suppress(psutil.Error):
        return _is_instance(_words(process))
    return False


def _is_instance(words: str) -> bool:
    return words.startswith((_ACTOR, "sglang::")) or _HOST in words


def _ours(fits: Callable[[str], bool]) -> list[psutil.Process]:
    """Return the processes with a command line that fits, which have this process's variables of Ray."""
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            if fits(_words(one)) and one.environ().get("RAY_TMPDIR") == os.environ["RAY_TMPDIR"]:
                found.append(one)
    return found


def end_rest() -> None:
    """End all processes of the harness's Ray."""
    for one in _ours(lambda words: True):
        with suppress(psutil.Error):
            if one.pid != os.getpid():
                one.kill()


def actor_below(raylet: psutil.Process) -> psutil.Process | None:
    """Return the instance of a node, or None."""
    with suppress(psutil.Error):
        return next((one for one in raylet.children() if _words(one).startswith(_ACTOR)), None)
    return None


def hosts_below(actor: psutil.Process) -> list[psutil.Process]:
    """Return the hosts of an instance's engine: one, or none while it starts."""
    with suppress(psutil.Error):
        return [one for one in actor.children() if _HOST in _words(one)]
    return []


def part_of(actor: psutil.Process, part: str) -> psutil.Process | None:
    """Return one of ENGINE_PARTS of an instance, or None while it does not run."""
    hosts = hosts_below(actor)
    if part == "host" or not hosts:
        return hosts[0] if hosts else None
    with suppress(psutil.Error):
        return next((one for one in hosts[0].children(recursive=True) if f"sglang::{part}" in _words(one)), None)
    return None


def below(process: psutil.Process) -> list[psutil.Process]:
    """Return all descendants of a process."""
    with suppress(psutil.Error):
        found: list[psutil.Process] = process.children(recursive=True)
        return found
    return []


def outlived(tree: Iterable[psutil.Process]) -> list[str]:
    """Return the command lines of processes that live after WITHIN_S. They are ended then."""
    _, left = psutil.wait_procs(list(tree), timeout=WITHIN_S)
    names = []
    for one in left:
        with suppress(psutil.Error):
            if one.status() != psutil.STATUS_ZOMBIE:
                names.append(f"{one.pid} {_words(one)[:80]}")
                one.kill()
    return names


def _words(process: psutil.Process) -> str:
    return " ".join(process.cmdline())
