"""Owns the failpoints: at each step of durability a test can kill the process or fail a write.

They are off unless the environment asks. SGL_BATCH_FAILPOINT=NAME[:COUNT] kills the process (SIGKILL) when it passes
NAME for the COUNT-th time (1 by default). NAME=enospc[:COUNT] and NAME=eio[:COUNT] raise that OSError instead, once.
"""

from __future__ import annotations

import ast
import errno
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from sgl_batch.errors import ConfigError

VARIABLE = "SGL_BATCH_FAILPOINT"
_FAULTS = {"enospc": errno.ENOSPC, "eio": errno.EIO}


@dataclass(slots=True, kw_only=True)
class Failpoint:
    """What happens at one failpoint, and after how many passes. `fault`: the errno to raise; None kills the process."""

    name: str
    fault: int | None
    passes_left: int


def parse_failpoint(text: str | None) -> Failpoint | None:
    """Return the failpoint that the variable asks for. Raises ConfigError for an unknown one."""
    if not text:
        return None
    rest, _, count = text.partition(":")
    name, _, fault = rest.partition("=")
    if name not in failpoint_names() or (fault and fault not in _FAULTS) or not (count or "1").isdecimal():
        raise ConfigError(
            f"{VARIABLE}={text} names no failpoint; give NAME[=enospc|=eio][:COUNT] with NAME one of "
            f"{', '.join(failpoint_names())}"
        )
    return Failpoint(name=name, fault=_FAULTS.get(fault), passes_left=int(count or "1"))


def failpoint(name: str) -> None:
    """Kill the process, or raise OSError, if the environment asks for it at this pass."""
    armed = _armed
    if armed is None or armed.name != name or armed.passes_left <= 0:
        return
    armed.passes_left -= 1
    if armed.passes_left:
        return
    if armed.fault is None:
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    else:
        raise OSError(armed.fault, os.strerror(armed.fault), f"failpoint {name}")


def failpoint_names() -> tuple[str, ...]:
    """Return the names of all failpoints in the source of this room."""
    names = [name for path in sorted(Path(__file__).parent.rglob("*.py")) for name in _names_in(path)]
    return tuple(sorted(set(names)))


def _names_in(path: Path) -> list[str]:
    return [
        str(node.args[0].value)
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "failpoint"
        and isinstance(node.args[0], ast.Constant)
    ]


# The environment is read once: a failpoint then costs one comparison.
_armed: Failpoint | None = parse_failpoint(os.environ.get(VARIABLE))
