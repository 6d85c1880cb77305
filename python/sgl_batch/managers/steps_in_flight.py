"""Owns the steps that were launched and whose results are not processed yet. It does not decide what is launched.

All work of a device is in one stream: the next step of a sequence finds the token of this step there, and the copies of
this step's results to the host lie between the two. So the host processes results after it has launched a forward pass
and before it launches the sampling of that pass, which may need them (grammars) and may wait for the device. On a CPU
a forward pass has ended when its call returns: the order is the same there, and nothing is gained. Not yet run on a
GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from sgl_batch.sglang_adapter.scheduling import copy_results_to_host
from sgl_batch.sglang_adapter.types.batches import BatchResult, ScheduleBatch

logger = logging.getLogger(__name__)


def is_wanted(overlap: str, settled: str) -> bool:
    """Return whether the option wants overlap; where it is `auto`, whether the choice of the start does."""
    return (settled if overlap == "auto" else overlap) == "on"


def check_overlap(overlap: str, *, several_ranks: bool) -> None:
    """Warn where the option asks several ranks to overlap steps, which they do not."""
    if several_ranks and overlap == "on":
        logger.warning(
            "overlap is 'on', which several ranks do not do: each step's results are processed before they agree on "
            "the next"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInFlight:
    """A step that was launched. `process` processes its results; it waits for the device unless the step `is_done`."""

    sequences: frozenset[str]
    process: Callable[[], None]
    is_done: Callable[[], bool]


class StepsInFlight:
    """Steps in flight, oldest first. A sequence is in at most one of them."""

    def __init__(self) -> None:
        self._steps: list[StepInFlight] = []

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, step: StepInFlight) -> bool:
        return step in self._steps

    def submit(self, step: StepInFlight, *, depth: int) -> StepInFlight:
        """Add a step that was just launched, and process the oldest until fewer than `depth` steps are in flight.

        With a depth of 1 its own results are processed now. With 2 they are processed while the next step runs. The
        next step is one of another group; or of the same sequences, if these are drained between its launch and its
        `submit`.
        """
        assert depth >= 1, f"a depth of {depth} has no room for the step itself"
        twice = [name for other in self._steps for name in other.sequences & step.sequences]
        assert not twice, f"{twice[0]} is in two steps: drain the earlier one first"
        self._steps.append(step)
        while len(self._steps) >= depth:
            self._process(self._steps[0])
        return step

    def poll(self) -> list[StepInFlight]:
        """Process the steps that are done, in order, up to the first that is not. Return those processed."""
        processed = []
        while self._steps and self._steps[0].is_done():
            processed.append(self._process(self._steps[0]))
        return processed

    def drain(self, sequences: Collection[str] | None = None) -> list[StepInFlight]:
        """Process the steps of these sequences, or all steps where `sequences` is None; return those, in order.

        Afterwards none of the sequences is in flight. Steps of other sequences stay in flight.
        """
        touched = [step for step in self._steps if sequences is None or not step.sequences.isdisjoint(sequences)]
        return [self._process(step) for step in touched]

    def _process(self, step: StepInFlight) -> StepInFlight:
        """Process a step. It is removed first, so that a step that raises is not processed again."""
        self._steps.remove(step)
        step.process()
        return step


def with_copied_results(
    batch: ScheduleBatch, result: BatchResult, process: Callable[[ScheduleBatch, BatchResult], None]
) -> StepInFlight:
    """Begin the copies of a step's results to the host, and return the step.

    The batch may change for the next step meanwhile: the results are processed for a copy of its present rows.
    """
    done = copy_results_to_host(batch, result)
    kept = batch.copy()
    return StepInFlight(
        sequences=frozenset(request.rid for request in kept.reqs),
        process=lambda: process(kept, result),
        is_done=done.query,
    )
