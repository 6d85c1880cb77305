"""Owns finding what other machines, and other users of this one, can reach of a program."""

from __future__ import annotations

import ipaddress
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def tree_of(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def listening(process: psutil.Process) -> Iterator[tuple[str, int]]:
    """Yield the addresses on which a process takes connections or packets."""
    for socket in process.net_connections(kind="inet"):
        if socket.laddr and not socket.raddr:
            yield socket.laddr.ip, socket.laddr.port


def exposed_to_others(pid: int) -> list[str]:
    """Return what `pid` and its descendants expose to other machines, and to other users of this one."""
    found = []
    for process in tree_of(pid):
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            addresses = [f"{ip}:{port}" for ip, port in listening(process) if not ipaddress.ip_address(ip).is_loopback]
            unix = {Path(socket.laddr) for socket in process.net_connections(kind="unix") if socket.laddr}
            maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            shared = {Path(line.split(maxsplit=5)[5]) for line in maps if " /dev/shm/" in line}
            exposed = [str(path) for path in unix | shared if path.exists() and not _is_private(path)]
            found += [f"{process.pid} {process.name()}: {name}" for name in (*addresses, *exposed)]
    return found


def _is_private(path: Path) -> bool:
    """Return whether only its owner can open a file, by its own mode or that of a directory above it."""
    return any(part.stat().st_mode & _OTHERS == 0 for part in (path, *path.parents))
