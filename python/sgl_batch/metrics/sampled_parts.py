"""Owns the device's time by part of a forward pass, measured by events in some passes and scaled to all.

A host that runs ahead of its device cannot tell where the device's time goes, and may not wait to find out. So events
are recorded in the device's stream where parts begin and end, and read when they have happened.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

# Of passes that come by the thousand, one in so many is measured by part. It runs kernel by kernel where others are
# replays of a graph, which shows no parts; twice as slow, it would cost less than a hundredth of the time.
SAMPLE_EVERY = 128
DECODE, MIXED, PREFILL, SAMPLING = "decode", "mixed", "prefill", "sampling"
_EVERY = {DECODE: SAMPLE_EVERY, MIXED: SAMPLE_EVERY, PREFILL: 1, SAMPLING: SAMPLE_EVERY}


class Event(Protocol):
    """A place in the device's stream; `elapsed_time` is in ms, to a later one that the device has passed."""

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Event) -> float: ...


def record_cuda_event() -> Event:
    """An event behind all that torch's current stream has been given."""
    event: Any = torch.cuda.Event(enable_timing=True)
    event.record()
    made: Event = event
    return made


@dataclass(slots=True)
class _Sample:
    """A pass that is measured: the parts that it consists of, each with the event at its beginning, and its end."""

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
    """Which passes are measured, and what they add up to. `record`: gives an event in the device's stream.

    A pass that stands for others is followed by one that runs as they do, and is measured as a whole: of its time, each
    part gets the share that it had in the first.
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
        """Whether the pass under way is measured by part; it must run kernel by kernel then."""
        return self._open is not None and self._open.by_part

    @contextmanager
    def measured(self, kind: str) -> Iterator[None]:
        """A forward pass, or the sampling behind one, which begins in the part `other`."""
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
        """From here on the device computes `part`, if the pass under way is measured by part."""
        if self._open is not None and self._open.by_part:
            self._open.parts.append((part, self._record()))

    def collect(self) -> None:
        """Add up the passes that the device has ended. It does not wait for any."""
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
            # Not more than kernel by kernel: a pass that was captured first took long, and does not stand for others.
            scale = every * min(sum(seconds.values()) / max(sum(parts.values()), 1e-9), 1.0)
        for part, value in parts.items():
            self.part_s[part] += scale * value
