"""Owns what the engine's process gets from its parent, the server, and how it notices the parent's end.

It imports nothing slow: the parent may end while the engine's libraries are still being imported.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from sgl_batch.engine.line_frames import Failed, write_frame
from sgl_batch.owned_directory import remove_tree

_PR_SET_PDEATHSIG = 1


class ParentLink(msgspec.Struct, frozen=True, kw_only=True):
    """One line of JSON on the standard input of the engine's process. The input stays open while the parent runs.

    `socket`: where the parent listens for this engine. `directory`: the parent's own directory, which holds the socket.
    `api_key`: the key for SGLang's HTTP endpoints. `parent_pid`: the process to end with. `request_logs`: the directory
    of request logs, where the command line names none.
    """

    socket: str
    directory: str
    api_key: str
    parent_pid: int
    request_logs: str

    def encode(self) -> bytes:
        """Return the line for standard input."""
        return msgspec.json.encode(self) + b"\n"

    def report_failure(self, message: str, code: str | None) -> None:
        """Report to the parent why there is no engine, before the connection for lines is open."""
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.socket)
            connection.sendall(write_frame(Failed(message=message, code=code)))


def read_link() -> ParentLink:
    """Read the link, and end with the parent from now on (SIGHUP). Exit at once if the parent has ended already.

    Until another handler of SIGHUP replaces this one, it removes the parent's directory, all that the parent leaves.
    """
    data = bytearray()
    while not data.endswith(b"\n"):
        more = os.read(sys.stdin.fileno(), 65536)
        if not more:
            os._exit(1)
        data += more
    link = msgspec.json.decode(data, type=ParentLink)
    signal.signal(signal.SIGHUP, partial(_end_after_parent, link))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != link.parent_pid:
        _end_after_parent(link)
    return link


def _end_after_parent(link: ParentLink, *_: object) -> NoReturn:
    remove_tree(Path(link.directory))
    os._exit(1)
