"""Owns the process that starts the ranks and hands requests to them, and that ends all ranks when one of them ends.

It watches a rank from the moment that the rank's process begins, also while other ranks still load or wait for it. When
a rank ends, it reports why to the engine's own process, which waits for this one, and ends all ranks. core/dealing
decides which rank gets a request that names none.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing.process import BaseProcess
from typing import NoReturn

from sgl_batch.managers.failure_reporter import FailureReporter
from sgl_batch.managers.process_watch import Peaks, end_of
from sgl_batch.sglang_adapter.ranks import run_controller_with

_LOOK_S = 0.1
# A rank that ends takes others with it. For this long the first rank that is seen to end may not be the cause.
_CAUSE_S = 1.0


def run_rank_controller(reporter: FailureReporter, **kwargs: object) -> None:
    """Run the controller process. `reporter`: for its own end; `kwargs`: SGLang's arguments of its controller."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A rank that fails sends SGLang's SIGQUIT to its parent; here its exit code is enough, and names the cause.
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    ranks = _Ranks(reporter)
    threading.Thread(target=ranks.watch, name="rank watch", daemon=True).start()
    run_controller_with(ranks.processes, ranks.end_unstarted, ranks.end_by, reporter.rendezvous.directory, **kwargs)


class _Ranks:
    """Watches the ranks. `processes`: those of each rank that runs, which another thread adds."""

    def __init__(self, reporter: FailureReporter) -> None:
        self._reporter, self._rendezvous = reporter, reporter.rendezvous
        self._peaks = Peaks()
        self.processes: dict[int, list[BaseProcess]] = {}

    def watch(self) -> None:
        """Wait until a rank ends, then end all ranks and this process."""
        while not self._exit_codes():
            self._peaks.look(self._running())
            time.sleep(_LOOK_S)
        deadline = time.monotonic() + _CAUSE_S
        while not self._cause_is_known() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        codes = self._exit_codes()
        first = min(codes, key=codes.__getitem__)
        peak_bytes = max(map(self._peaks.of, self.processes[first]))
        self._end(f"rank {first} of the engine {end_of(codes[first], peak_bytes)}")

    def end_unstarted(self, rank: int, what: str) -> NoReturn:
        """End this process because a rank's process could not be started."""
        self._end(f"rank {rank} of the engine could not be started ({what})")

    def end_by(self, error: Exception) -> NoReturn:
        """End this process because of a fault in it."""
        self._reporter.report(error)
        self._end(str(error))

    def _running(self) -> list[BaseProcess]:
        return [process for processes in list(self.processes.values()) for process in processes]

    def _exit_codes(self) -> dict[int, int]:
        """Return the exit codes of the ranks that have ended."""
        listed = [(rank, process) for rank, processes in list(self.processes.items()) for process in processes]
        return {rank: process.exitcode for rank, process in listed if process.exitcode is not None}

    def _cause_is_known(self) -> bool:
        """Return whether a rank has reported a failure, or was killed: then the others failed because they lost it."""
        return self._rendezvous.failure is not None or min(self._exit_codes().values()) < 0

    def _end(self, text: str) -> NoReturn:
        try:
            self._rendezvous.report_failure(text)
            for processes in list(self.processes.values()):
                for process in processes:
                    process.kill()
                    process.join()
        finally:  # even if a step fails here, the engine's own process must not wait for this one
            os._exit(1)
