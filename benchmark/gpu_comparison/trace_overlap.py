"""Owns the overlap in a profiler's trace: how much copying ran while the GPU computed. Pure, except for reading.

A trace is that of torch's profiler, in Chrome's format; times in it are in microseconds.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_COPIES_OF_HOST = ("HtoD", "DtoH")
Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Seconds of a GPU in a trace: computing, copying from or to the host, and both at once."""

    stretch_s: float
    computed_s: float
    copied_s: float
    both_s: float

    def text(self) -> str:
        """Return the overlap as text, for the report."""
        busy = f"in {1e3 * self.stretch_s:.1f} ms the GPU computed for {1e3 * self.computed_s:.1f} ms"
        if not self.copied_s:
            return f"{busy} and copied nothing from or to the host"
        share = self.both_s / self.copied_s
        return f"{busy} and copied from and to the host for {1e3 * self.copied_s:.1f} ms, {share:.0%} of it meanwhile"


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Read the events of a trace, compressed or not."""
    data = path.read_bytes()
    events: list[dict[str, Any]] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    return events


def overlap_of(events: Iterable[dict[str, Any]]) -> Overlap | None:
    """Return the overlap in the events, or None if no GPU worked, as in a trace of a CPU."""
    kernels, copies = [], []
    for event in events:
        if event.get("ph") != "X":
            continue
        span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        if event.get("cat") == "kernel":
            kernels.append(span)
        elif event.get("cat") == "gpu_memcpy" and any(way in event["name"] for way in _COPIES_OF_HOST):
            copies.append(span)
    if not kernels and not copies:
        return None
    computed, copied = union(kernels), union(copies)
    ends = [*computed, *copied]
    return Overlap(
        stretch_s=(max(end for _, end in ends) - min(begin for begin, _ in ends)) / 1e6,
        computed_s=_length(computed) / 1e6,
        copied_s=_length(copied) / 1e6,
        both_s=_length(common(computed, copied)) / 1e6,
    )


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the union of intervals, in order."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def common(first: list[Span], second: list[Span]) -> list[Span]:
    """Return the intersection of two unions of intervals."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            found.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)
