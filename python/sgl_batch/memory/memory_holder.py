"""Owns the process that holds memory for an engine's start (`held_memory`), from its begin to its end."""

from __future__ import annotations

import subprocess
import sys
from typing import Self


class MemoryHolder:
    """A process that takes up to `num_bytes` of memory until `hand_over`, and frees them then as others take memory.

    Nobody depends on it: where it fails, memory is as slow as without it. It ends at the end of its `with` block, with
    this process, or when nothing is left. With 0 bytes there is none.
    """

    def __init__(self, num_bytes: int) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if num_bytes > 0:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sgl_batch.memory.held_memory", str(num_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    @property
    def pid(self) -> int | None:
        """The number of the process; None if there is none."""
        return None if self._process is None else self._process.pid

    def hand_over(self) -> None:
        """Take no more, and free what is held as others take memory."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process, which frees what is left. Idempotent."""
        if self._process is not None:
            self.hand_over()
            self._process.kill()
            self._process.wait()
