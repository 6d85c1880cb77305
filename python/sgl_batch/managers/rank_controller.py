"""Owns the process that starts the ranks and hands requests to them, and its notice when one of them ends.

It sees a rank's end from the moment that the rank's process begins, also where the others still load or wait for it,
and ends them all then: the engine's own process, which waits for this one, hears why. Which rank gets a request is
SGLang's (round robin, or the rank that the request names).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing.process import BaseProcess
from typing import NoReturn

from sgl_batch.managers.last_words import LastWords
from sgl_batch.managers.process_watch import Peaks, end_of
from sgl_batch.sglang_adapter.ranks import run_controller_with

_LOOK_S = 0.1
# A rank that ends takes others with it: for so long the first that is seen to end may not be the cause.
_LAST_WORDS_S = 1.0


def run_rank_controller(last: LastWords, **kwargs: object) -> None:
    """Body of the controller process. `last`: what it says at its own end; `kwargs`: SGLang's for its controller."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A rank that fails sends SGLang's SIGQUIT to its parent; here its exit is enough, and its cause can be told.
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    ranks = _Ranks(last)
    threading.Thread(target=ranks.watch, name="rank watch", daemon=True).start()
    run_controller_with(ranks.processes, ranks.end_unstarted, ranks.end_by, last.rendezvous.directory, **kwargs)


class _Ranks:
    """`processes`: each rank's, once it runs; another thread puts them there."""

    def __init__(self, last: LastWords) -> None:
        self._last, self._rendezvous = last, last.rendezvous
        self._peaks = Peaks()
        self.processes: dict[int, list[BaseProcess]] = {}

    def watch(self) -> None:
        """Wait for the end of a rank, and end this process."""
        while not self._exit_codes():
            self._peaks.look(self._running())
            time.sleep(_LOOK_S)
        deadline = time.monotonic() + _LAST_WORDS_S
        while not self._cause_is_known() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        codes = self._exit_codes()
        first = min(codes, key=codes.__getitem__)
        peak_bytes = max(map(self._peaks.of, self.processes[first]))
        self._end(f"rank {first} of the engine {end_of(codes[first], peak_bytes)}")

    def end_unstarted(self, rank: int, what: str) -> NoReturn:
        """A rank's process could not be started."""
        self._end(f"rank {rank} of the engine could not be started ({what})")

    def end_by(self, error: Exception) -> NoReturn:
        """A fault ends this process."""
        self._last.report(error)
        self._end(str(error))

    def _running(self) -> list[BaseProcess]:
        return [process for processes in list(self.processes.values()) for process in processes]

    def _exit_codes(self) -> dict[int, int]:
        """Those of the ranks that have ended."""
        listed = [(rank, process) for rank, processes in list(self.processes.items()) for process in processes]
        return {rank: process.exitcode for rank, process in listed if process.exitcode is not None}

    def _cause_is_known(self) -> bool:
        """A rank that gives up has said why. A killed one is the cause; the others have failed at its loss."""
        return self._rendezvous.failure is not None or min(self._exit_codes().values()) < 0

    def _end(self, text: str) -> NoReturn:
        try:
            self._rendezvous.report_failure(text)
            for processes in list(self.processes.values()):
                for process in processes:
                    process.kill()
                    process.join()
        finally:  # whatever fails here, the engine's own process must not wait for this one
            os._exit(1)
