"""Owns what a front tells the engine's process that it starts, and how that process learns of the front's end.

It imports nothing slow: the front may end while the engine's libraries are still being imported.
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
    """One line of JSON on the standard input of the engine's process, which stays open as long as the front lives.

    `socket`: where the front listens for this engine, in `directory`, which is the front's own. `api_key` opens
    SGLang's HTTP endpoints. `parent_pid`: the process to die with. `request_logs`: where requests are logged, where the
    command line names no place.
    """

    socket: str
    directory: str
    api_key: str
    parent_pid: int
    request_logs: str

    def encode(self) -> bytes:
        """As it goes to standard input."""
        return msgspec.json.encode(self) + b"\n"

    def report_failure(self, message: str, code: str | None) -> None:
        """Tell the front why there is no engine, before there is a conversation."""
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.socket)
            connection.sendall(write_frame(Failed(message=message, code=code)))


def read_link() -> ParentLink:
    """Read the link, and die with the front from now on (SIGHUP). Exits at once if it is gone already.

    As long as nobody else handles that signal, what the front leaves behind is its directory alone.
    """
    data = bytearray()
    while not data.endswith(b"\n"):
        more = os.read(sys.stdin.fileno(), 65536)
        if not more:
            os._exit(1)
        data += more
    link = msgspec.json.decode(data, type=ParentLink)
    signal.signal(signal.SIGHUP, partial(_end_after_front, link))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != link.parent_pid:
        _end_after_front(link)
    return link


def _end_after_front(link: ParentLink, *_: object) -> NoReturn:
    remove_tree(Path(link.directory))
    os._exit(1)
