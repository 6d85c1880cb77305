"""Owns a small process that kills others once this one has ended, however it ends. It does not choose which.

The guard is this file as a program. It holds a pidfd of each process, which never means another process of the same
number, and waits for the end of its standard input: this process has the other end of that pipe.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress

_ENDED_WITHIN_S = 5.0


class ProcessGuard:
    """Kills processes (SIGKILL) when it is closed, or when this process has ended. Those that have ended are left out.

    Args:
        pids: The processes; they need not be children of this one.

    Raises:
        OSError: The kernel has no pidfds, or the guard cannot be started.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        held: list[int] = []
        try:
            for pid in pids:
                with suppress(ProcessLookupError):
                    held.append(os.pidfd_open(pid))
            # A session of its own: a signal to this process's group leaves it alone.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, *map(str, held)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=held,
                start_new_session=True,
            )
        finally:
            for one in held:
                os.close(one)

    @property
    def pid(self) -> int:
        """The guard's own process."""
        return self._process.pid

    def close(self) -> None:
        """Kill the processes now. Idempotent."""
        assert self._process.stdin is not None, "it has a pipe"
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDED_WITHIN_S)


def _guard(held: Iterable[int]) -> None:
    while os.read(0, 1):
        pass
    for one in held:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(one, signal.SIGKILL)


if __name__ == "__main__":
    _guard([int(word) for word in sys.argv[1:]])
