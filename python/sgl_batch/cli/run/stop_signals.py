"""Turns the signals that ask a run to stop into an event; decides nothing about what stopping means."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KEEP_EVERY_S = 1.0


@contextmanager
def signals_restored() -> Iterator[None]:
    """Give the signals back to whoever listened before."""
    before = {one: signal.getsignal(one) for one in _SIGNALS}
    try:
        yield
    finally:
        for one, handler in before.items():
            if handler is not None:  # None: installed by something other than Python
                signal.signal(one, handler)


class StopSignals:
    """The first signal sets `stop`, the second calls `at_once`.

    A signal that was ignored from the start (SIGHUP under nohup) stays ignored.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, stop: asyncio.Event, at_once: Callable[[], None]) -> None:
        self._loop = loop
        self._stop = stop
        self._at_once = at_once
        self._signals = [one for one in _SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]

    def install(self) -> None:
        """Listen to the signals; replaces whoever listened."""
        for one in self._signals:
            self._loop.add_signal_handler(one, self._received)

    async def keep(self) -> None:
        """Stay the listener: SGLang's tokenizer manager takes SIGTERM over when its first request arrives."""
        while True:
            self.install()
            await asyncio.sleep(_KEEP_EVERY_S)

    def ignore(self) -> None:
        """From now on the run is over: a signal must not break the last writing."""
        for one in self._signals:
            self._loop.remove_signal_handler(one)
            signal.signal(one, signal.SIG_IGN)

    def _received(self) -> None:
        if self._stop.is_set():
            self._at_once()
        self._stop.set()
