"""Owns the child processes that an engine's program has started: it awaits their readiness and notices the first end.

Its users decide what follows from an end. SGLang's own watch looks once a second, does not see a detokenizer that ends
while the model is loaded, and sends the program a signal.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import psutil

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.errors import EngineError

_LOOK_S = 0.5
_END_S = 10.0
# A process that runs our code reports why it fails. Before that it reads the program's own file.
_UNGUARDED = (
    ". It failed before it began: each process reads the program's file anew, so code that makes an engine belongs "
    'below `if __name__ == "__main__":`'
)
# Signals at which the C library or faulthandler writes a stack to standard error.
_NATIVE_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)


def end_of(exit_code: int, peak_bytes: int = 0) -> str:
    """Return the text that says how a process ended. `peak_bytes`: its highest memory seen, 0 where unknown."""
    if exit_code >= 0:
        return f"failed (exit code {exit_code}); its own message stands above"
    number = -exit_code
    name = signal.Signals(number).name if number in map(int, signal.Signals) else f"signal {number}"
    if number in _NATIVE_FAULTS:
        return f"died: {name} (a fault in native code); its stack stands above"
    died = f"died: {name} (its process was killed)"
    if number != signal.SIGKILL:
        return died
    had = f"it had taken {format_bytes(peak_bytes)} of memory" if peak_bytes else "its memory is not known"
    total = format_bytes(psutil.virtual_memory().total)
    return (
        f"{died}, as the kernel does where memory runs out; {had}, and the machine has {total}: lower "
        "--max-total-tokens, --device-memory or --kv-store-bytes, or stream the weights"
    )


class Peaks:
    """The highest memory use seen of each process."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}

    def look(self, processes: Sequence[BaseProcess]) -> None:
        """Note the present memory use of each process that still runs."""
        for process in processes:
            try:
                now = psutil.Process(process.pid).memory_info().rss
            except psutil.Error:
                continue
            assert process.pid is not None, "a running process has an id"
            self._bytes[process.pid] = max(now, self.of(process))

    def of(self, process: BaseProcess) -> int:
        """Return the bytes; 0 for a process that was never looked at."""
        return self._bytes.get(process.pid or 0, 0)


class ProcessEndedError(EngineError):
    """A process of the engine has ended. The message says how."""


class ProcessWatch:
    """Watches processes. Pickled for a child process it is empty, because the processes are the parent's."""

    def __init__(self) -> None:
        self._named: list[tuple[str, BaseProcess]] = []
        self._peaks = Peaks()
        self._thread: threading.Thread | None = None
        self._stopping: tuple[Connection, Connection] | None = None

    def __reduce__(self) -> tuple[type[ProcessWatch], tuple[()]]:
        return ProcessWatch, ()

    def add(self, name: str, processes: Sequence[BaseProcess]) -> None:
        """Watch these processes, too, which have just started."""
        self._named += [(name, process) for process in processes]
        self._look()

    def await_ready(self, readers: Sequence[Connection], senders: Sequence[BaseProcess]) -> list[dict[str, object]]:
        """Wait until each of `senders` has sent its info through its pipe; return the infos in the order of `readers`.

        It closes each of `readers` that has been read. Raises ProcessEndedError as soon as any watched process ends.
        """
        infos: dict[int, dict[str, object]] = {}
        self._look()
        while len(infos) < len(readers):
            waiting = [one for number, one in enumerate(readers) if number not in infos]
            ready = connection.wait([*waiting, *(process.sentinel for _, process in self._named)], _LOOK_S)
            self._look()
            for number, (reader, sender) in enumerate(zip(readers, senders, strict=True)):
                if number not in infos and reader in ready:
                    infos[number] = self._received(reader, sender)
            self._raise_for_ended()
        return [infos[number] for number in range(len(readers))]

    def watch(self, on_end: Callable[[str], None]) -> None:
        """Call `on_end`, in a thread, with the text that says how the first process fails or dies."""
        self._stopping = stopping = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._run, args=(stopping[0], on_end), name="process watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching: from now on processes may end. Idempotent."""
        if self._thread is None or self._stopping is None:
            return
        reader, writer = self._stopping
        writer.close()
        if self._thread is not threading.current_thread():
            self._thread.join()
            reader.close()
        self._thread = None

    def close(self) -> None:
        """Wait for the processes, which have been ended, and close their descriptors. The watch has stopped."""
        for _, process in self._named:
            process.join(_END_S)
            process.close()
        self._named.clear()

    def _run(self, stopping: Connection, on_end: Callable[[str], None]) -> None:
        running = list(self._named)
        while running:
            ready = connection.wait([stopping, *(process.sentinel for _, process in running)], _LOOK_S)
            if stopping in ready:
                return
            self._look()
            for name, process in [one for one in running if one[1].sentinel in ready]:
                running.remove((name, process))
                code = _exit_code(process)
                if code:
                    on_end(f"{name} {end_of(code, self._peaks.of(process))}")
                    return

    def _look(self) -> None:
        self._peaks.look([process for _, process in self._named])

    def _received(self, reader: Connection, sender: BaseProcess) -> dict[str, object]:
        try:
            info: dict[str, object] = reader.recv()
        except EOFError:
            raise self._ended(sender) from None
        reader.close()
        return info

    def _raise_for_ended(self) -> None:
        for _, process in self._named:
            if process.exitcode is not None:
                raise self._ended(process)

    def _ended(self, process: BaseProcess) -> ProcessEndedError:
        name = next((name for name, one in self._named if one is process), "a process of the engine")
        code = _exit_code(process)
        how = "did not end and closed its pipe" if code is None else end_of(code, self._peaks.of(process))
        return ProcessEndedError(f"{name} {how}{_UNGUARDED if code == 1 else ''}")


def _exit_code(process: BaseProcess) -> int | None:
    process.join(_END_S)
    return process.exitcode
