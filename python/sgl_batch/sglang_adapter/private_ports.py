"""Adapts the addresses at which an engine's SGLang processes listen: a private directory of the user, and loopback.

SGLang sends pickles in both directions: a process that can write to these sockets can run any program. By itself SGLang
uses public temporary files and ports of every interface.
"""

from __future__ import annotations

import dataclasses
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.child_processes import environment

with bootstrap.importing():
    from sglang.srt.server_args import PortArgs
    from sglang.srt.utils.network import try_bind_socket

__all__ = ["LONGEST_NAME", "PrivatePorts", "hold_port", "on_this_machine", "temporary_files_in"]

_LOOPBACK = "127.0.0.1"
_IPC = "ipc://"
# The most characters of a socket's name in the directory, also for an engine's ranks.
LONGEST_NAME = 16


class PrivatePorts:
    """Makes SGLang's PortArgs with all sockets in `directory`; `label` keeps their names apart there.

    Only the directory's owner may have access to it.
    """

    def __init__(self, directory: Path, label: str) -> None:
        self._directory, self._label = directory, label
        self._count = 0

    def init_new(self, server_args: Any) -> Any:
        """Return addresses for one more group of processes. It replaces SGLang's PortArgs.init_new."""
        ports = PortArgs.init_new(server_args)
        for field in dataclasses.fields(ports):
            address = getattr(ports, field.name)
            if isinstance(address, str) and address.startswith(_IPC):
                Path(address.removeprefix(_IPC)).unlink()  # SGLang leaves an empty file there, to reserve the name
                setattr(ports, field.name, f"{_IPC}{self._directory}/{self._label}{self._count}")
                self._count += 1
        return ports


@contextmanager
def temporary_files_in(directory: Path) -> Iterator[None]:
    """Inside, sockets that SGLang names as temporary files are in `directory`."""
    before = tempfile.tempdir
    tempfile.tempdir = str(directory)
    try:
        yield
    finally:
        tempfile.tempdir = before


def hold_port(port: int) -> socket.socket:
    """Reserve a port for a while, without listening on it."""
    held: socket.socket = try_bind_socket(_LOOPBACK, port)
    return held


@contextmanager
def on_this_machine(store: Path | None = None) -> Iterator[None]:
    """Inside, process groups of torch.distributed listen on loopback only.

    SGLang's own group, of one rank, meets in the file `store`, and not at a port of every interface.
    """
    settings = {"GLOO_SOCKET_IFNAME": _loopback_interface()}
    if store is not None:
        settings["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{store}"
    with environment(settings):
        yield


def _loopback_interface() -> str:
    interfaces = psutil.net_if_addrs().items()
    return next(str(name) for name, addresses in interfaces if any(one.address == _LOOPBACK for one in addresses))
