"""Owns the process that starts the ranks and hands requests to them, and its notice when one of them ends.

Which rank gets a request is SGLang's (round robin, or the rank that the request names).
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from sgl_batch.distributed.rendezvous import Rendezvous
from sgl_batch.sglang_adapter.ranks import run_controller_with

# A rank that ends takes others with it; what these have to say about it is waited for.
_LAST_WORDS_S = 1.0


def run_rank_controller(directory: Path, **kwargs: Any) -> None:
    """Body of the controller process. `directory`: the engine's rendezvous; `kwargs`: SGLang's for its controller."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A rank that fails sends SGLang's SIGQUIT to its parent; here its exit is enough, and its cause can be told.
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    rendezvous = Rendezvous(directory)

    def watch(processes: list[Any]) -> None:
        ended = [process for process in processes if process.exitcode is not None]
        if ended:
            ranks = {int(pid): rank for rank, pid in rendezvous.published("pid").items()}
            # A killed one, if any, is the cause; the others have failed at its loss.
            first = min(ended, key=lambda process: process.exitcode)
            _fail(rendezvous, f"rank {ranks.get(first.pid, '?')} of the engine {_end_of(first.exitcode)}")

    def start_failed(rank: int | None, what: str) -> None:
        _fail(rendezvous, f"rank {rank} of the engine ended before it was ready ({what}); its own message stands above")

    run_controller_with(watch, start_failed, **kwargs)


def _fail(rendezvous: Rendezvous, text: str) -> None:
    deadline = time.monotonic() + _LAST_WORDS_S
    while rendezvous.failure is None and time.monotonic() < deadline:
        time.sleep(0.05)
    rendezvous.report_failure(text)
    os._exit(1)


def _end_of(exit_code: int) -> str:
    if exit_code >= 0:
        return f"failed (exit code {exit_code}); its own message stands above"
    return f"died: {signal.Signals(-exit_code).name} (its process was killed)"
