"""Shows a run's progress on a stream: a bar, plain lines or nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TextIO

from sgl_batch.jobs.progress import Snapshot

MODES = ("auto", "bar", "plain", "off")
PLAIN_EVERY_S = 5.0
PLAIN_EVERY_LATER_S = 30.0
PLAIN_LATER_AFTER_S = 600.0
SHOW_IDLE_AFTER_S = 60.0


class ProgressDisplay(Protocol):
    """Somewhere to show progress."""

    def update(self, snapshot: Snapshot) -> None:
        """Show this moment, or skip it when the last one shown is recent."""
        ...

    def note(self, message: str) -> None:
        """Write a message once, without disturbing the progress."""
        ...

    def close(self, snapshot: Snapshot) -> None:
        """Show the last moment and stop."""
        ...


def choose_display(mode: str, stream: TextIO) -> ProgressDisplay:
    """Return the display for a mode of MODES; `auto` is a bar on a terminal and plain lines elsewhere."""
    if mode == "bar" or (mode == "auto" and stream.isatty()):
        return BarDisplay(stream)
    return NoDisplay(stream) if mode == "off" else PlainDisplay(stream)


def write_line(stream: TextIO, message: str) -> None:
    """Write a line on a stream.

    A stream that is gone (a closed terminal, a reader that ended) must not end a run of ten hours: the line is dropped.
    """
    with suppress(OSError):
        stream.write(f"{message}\n")
        stream.flush()


class NoDisplay:
    """Shows notes only."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def update(self, snapshot: Snapshot) -> None:
        """Show nothing."""

    def note(self, message: str) -> None:
        """Write the message on a line of its own."""
        write_line(self._stream, message)

    def close(self, snapshot: Snapshot) -> None:
        """Show nothing."""


class PlainDisplay:
    """One line every few seconds; fewer in a long run, so that a log of ten hours stays readable."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: Snapshot | None = None

    def update(self, snapshot: Snapshot) -> None:
        """Write a line when the last one is old enough; the first at once."""
        every_s = PLAIN_EVERY_S if snapshot.elapsed_s < PLAIN_LATER_AFTER_S else PLAIN_EVERY_LATER_S
        if self._last is None or snapshot.elapsed_s - self._last.elapsed_s >= every_s:
            self.note(plain_line(snapshot))
            self._last = snapshot

    def note(self, message: str) -> None:
        """Write the message on a line of its own."""
        write_line(self._stream, message)

    def close(self, snapshot: Snapshot) -> None:
        """Always write the last line."""
        self.note(plain_line(snapshot))


class BarDisplay:
    """A tqdm bar."""

    def __init__(self, stream: TextIO, make_bar: Callable[..., Any] | None = None) -> None:
        self._stream = stream
        self._make_bar = make_bar or importlib.import_module("tqdm").tqdm
        self._bar: Any = None

    def update(self, snapshot: Snapshot) -> None:
        """Redraw the bar."""
        with suppress(OSError):
            if self._bar is None:
                self._bar = self._make_bar(
                    total=snapshot.total,
                    file=self._stream,
                    dynamic_ncols=True,
                    bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} lines [{elapsed}{postfix}]",
                )
            self._bar.n = snapshot.done
            self._bar.set_postfix_str(details(snapshot), refresh=False)
            self._bar.refresh()

    def note(self, message: str) -> None:
        """Write the message above the bar."""
        if self._bar is None:
            write_line(self._stream, message)
            return
        with suppress(OSError):
            self._bar.write(message, file=self._stream)

    def close(self, snapshot: Snapshot) -> None:
        """Leave the bar standing as it is at the end."""
        self.update(snapshot)
        if self._bar is not None:
            with suppress(OSError):
                self._bar.close()


def plain_line(snapshot: Snapshot) -> str:
    """Return the snapshot as one line of a log."""
    percent = 100 * snapshot.done / max(snapshot.total, 1)
    return (
        f"[{duration(snapshot.elapsed_s)}] {snapshot.done:,}/{snapshot.total:,} lines ({percent:.1f}%), "
        f"{details(snapshot)}"
    )


def details(snapshot: Snapshot) -> str:
    """Return failures, rates, ETA and cost, with a warning when nothing has moved for a while."""
    parts = [f"{snapshot.failed:,} failed"] if snapshot.failed else []
    parts.append(f"in {snapshot.tokens_in_per_s:,.0f} tok/s")
    parts.append(f"out {snapshot.tokens_out_per_s:,.0f} tok/s")
    is_running = snapshot.done < snapshot.total
    if is_running:
        parts.append(f"{snapshot.in_flight:,} in flight")
        parts.append("ETA ?" if snapshot.eta_s is None else f"ETA {duration(snapshot.eta_s)}")
    if snapshot.cost:
        parts.append(snapshot.cost)
    if is_running and snapshot.idle_s >= SHOW_IDLE_AFTER_S:
        parts.append(f"nothing finished for {duration(snapshot.idle_s)}")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Return seconds as 12:34, 1:02:03 or 2d 03:04:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
