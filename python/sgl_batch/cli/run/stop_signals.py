"""Turns the signals that ask a run to stop into an event."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KEEP_EVERY_S = 1.0


@contextmanager
def signals_restored() -> Iterator[None]:
    """Restore the handlers of the signals at the end."""
    before = {one: signal.getsignal(one) for one in _SIGNALS}
    try:
        yield
    finally:
        for one, handler in before.items():
            if handler is not None:  # None: installed by something other than Python
                signal.signal(one, handler)


class NotedInterrupt:
    """Raises KeyboardInterrupt for Ctrl-C, as Python does, and notes it: imports swallow it, or fail by it otherwise.

    `was_pressed`: whether Ctrl-C was pressed inside the context, and no later handler took it.
    """

    def __init__(self) -> None:
        self.was_pressed = False

    def __enter__(self) -> None:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._pressed)

    def __exit__(self, *error: object) -> None:
        if signal.getsignal(signal.SIGINT) == self._pressed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def check(self) -> None:
        """Raise a KeyboardInterrupt that was swallowed."""
        if self.was_pressed:
            raise KeyboardInterrupt

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        self.was_pressed = True
        raise KeyboardInterrupt


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
        """Handle the signals, in place of earlier handlers."""
        for one in self._signals:
            self._loop.add_signal_handler(one, self._received)

    async def keep(self) -> None:
        """Install the handlers again and again: SGLang's tokenizer manager replaces SIGTERM's at its first request."""
        while True:
            self.install()
            await asyncio.sleep(_KEEP_EVERY_S)

    def ignore(self) -> None:
        """Ignore the signals at the end of the run: they must not break the last writes."""
        for one in self._signals:
            self._loop.remove_signal_handler(one)
            signal.signal(one, signal.SIG_IGN)

    def _received(self) -> None:
        if self._stop.is_set():
            self._at_once()
        self._stop.set()
