"""Owns the timing of a primitive, and its samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from comparison.figures import Spread, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The samples of one operation in seconds, each for `unit` ("512 sequences", "one sequence").

    `context`: tokens of the sequences' KV, 0 where the operation does not depend on it. `per_step`: how often it takes
    place in a decode step of the batch; None where that depends on how often sequences wait or move.
    """

    category: str
    operation: str
    unit: str
    samples_s: tuple[float, ...]
    context: int = 0
    per_step: float | None = None

    @property
    def seconds(self) -> Spread:
        found = spread(self.samples_s)
        assert found is not None, "an operation is timed at least once"
        return found


def finish(device: str) -> None:
    """Wait for a GPU's queued work; a CPU has none."""
    if device != "cpu":
        torch.cuda.synchronize()


def sample(
    call: Callable[[], object],
    *,
    rounds: int,
    device: str = "cpu",
    prepare: Callable[[], object] | None = None,
    repeats: int = 1,
) -> tuple[float, ...]:
    """Time a call in each round, after a first one that is not counted; `prepare` runs before each, untimed.

    `repeats`: how often a round makes the call, of which the mean counts: for calls of microseconds.
    """
    found = []
    for number in range(rounds + 1):
        if prepare is not None:
            prepare()
        finish(device)
        begun = time.perf_counter()
        for _ in range(repeats):
            call()
        finish(device)
        if number:
            found.append((time.perf_counter() - begun) / repeats)
    return tuple(found)
