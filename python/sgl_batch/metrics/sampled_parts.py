"""Owns the device's time by part of a forward pass, measured by events in some passes and scaled to all.

A host that runs ahead of its device cannot see where the device's time goes, and may not wait for it. So events are
recorded in the device's stream where parts begin and end, and read after they have happened.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

# Of frequent kinds of passes, one in so many is measured by part. It runs kernel by kernel; the others may replay a
# graph, which has no parts. If that is twice as slow, it costs less than a hundredth of the time.
SAMPLE_EVERY = 128
DECODE, MIXED, PREFILL, SAMPLING = "decode", "mixed", "prefill", "sampling"
_EVERY = {DECODE: SAMPLE_EVERY, MIXED: SAMPLE_EVERY, PREFILL: 1, SAMPLING: SAMPLE_EVERY}


class Event(Protocol):
    """An event in the device's stream. `elapsed_time` is in ms, to a later event that the device has passed."""

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Event) -> float: ...


def record_cuda_event() -> Event:
    """Record an event after all that torch's current stream was given."""
    event: Any = torch.cuda.Event(enable_timing=True)
    event.record()
    made: Event = event
    return made


@dataclass(slots=True)
class _Sample:
    """A measured pass: its parts, each with the event at its begin, and the event at the end."""

    kind: str
    by_part: bool
    parts: list[tuple[str, Event]] = field(default_factory=list)
    end: Event | None = None

    def seconds(self) -> dict[str, float]:
        assert self.end is not None, "the pass has ended"
        ends = [event for _, event in self.parts[1:]] + [self.end]
        seconds: defaultdict[str, float] = defaultdict(float)
        for (part, begin), end in zip(self.parts, ends, strict=True):
            seconds[part] += begin.elapsed_time(end) / 1e3
        return seconds


class SampledParts:
    """Chooses the passes that are measured, and adds up their time by part. `record` records an event in the stream.

    Of a frequent kind of pass, one is measured by part, and the next, which runs as all others do, as a whole. Each
    part gets the share of the whole time that it had in the first pass. This is scaled to all passes.
    """

    def __init__(self, record: Callable[[], Event] = record_cuda_event) -> None:
        self.part_s: defaultdict[str, float] = defaultdict(float)
        self._record = record
        self._num_passes: defaultdict[str, int] = defaultdict(int)
        self._pending: deque[_Sample] = deque()
        self._shares: dict[str, dict[str, float]] = {}
        self._open: _Sample | None = None

    @property
    def by_part(self) -> bool:
        """Whether the current pass is measured by part. It must then run kernel by kernel."""
        return self._open is not None and self._open.by_part

    @contextmanager
    def measured(self, kind: str) -> Iterator[None]:
        """Inside, a forward pass or the sampling after it runs. It begins in the part `other`."""
        assert self._open is None, "one pass at a time"
        number, every = self._num_passes[kind], _EVERY[kind]
        self._num_passes[kind] += 1
        by_part, whole = number % every == every - 1, every > 1 and number > 0 and number % every == 0
        if not (by_part or whole):
            yield
            return
        sample = self._open = _Sample(kind, by_part, [("other", self._record())])
        try:
            yield
            sample.end = self._record()
            self._pending.append(sample)
        finally:
            self._open = None

    def mark(self, part: str) -> None:
        """Note that the device computes `part` from here on, if the current pass is measured by part."""
        if self._open is not None and self._open.by_part:
            self._open.parts.append((part, self._record()))

    def collect(self) -> None:
        """Add up the passes that the device has ended. Does not wait."""
        while self._pending:
            end = self._pending[0].end
            if end is None or not end.query():
                return
            self._add(self._pending.popleft())

    def _add(self, sample: _Sample) -> None:
        seconds, every = sample.seconds(), _EVERY[sample.kind]
        if sample.by_part and every > 1:
            self._shares[sample.kind] = seconds
            return
        scale, parts = 1.0, seconds
        if every > 1:
            parts = self._shares.pop(sample.kind)
            # At most the time kernel by kernel: a pass that captured a graph first is slow, unlike the others.
            scale = every * min(sum(seconds.values()) / max(sum(parts.values()), 1e-9), 1.0)
        for part, value in parts.items():
            self.part_s[part] += scale * value
