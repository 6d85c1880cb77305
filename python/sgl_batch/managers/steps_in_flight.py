"""Owns the steps that were launched and whose results are not processed. It does not decide what is launched, or when.

All work of a device is in one stream: the next step of a sequence finds the token of this one there, and the copies for
the host lie between the two. So the host processes results behind the launch of a forward pass and before that of its
sampling, which may want them (grammars) and may wait for the device. On a CPU a forward pass has ended when its call
returns: everything is in the same order there, and nothing is won. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from sgl_batch.sglang_adapter.scheduling import copy_results_to_host
from sgl_batch.sglang_adapter.types.batches import BatchResult, ScheduleBatch


def is_wanted(overlap: str, settled: str) -> bool:
    """What the option says, and where that is `auto`, what the start has settled."""
    return (settled if overlap == "auto" else overlap) == "on"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInFlight:
    """A step that was launched. `process` takes its results in, and waits for the device unless it `is_done`."""

    sequences: frozenset[str]
    process: Callable[[], None]
    is_done: Callable[[], bool]


class StepsInFlight:
    """Steps by their sequences, oldest first. A sequence is in at most one of them."""

    def __init__(self) -> None:
        self._steps: list[StepInFlight] = []

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, step: StepInFlight) -> bool:
        return step in self._steps

    def submit(self, step: StepInFlight, *, depth: int) -> StepInFlight:
        """Take over a step that was just launched; afterwards fewer than `depth` steps are left to process.

        With a depth of 1 its own results are processed now. With 2 they are while the next step is computed: that of
        another group, or of the same sequences if those are drained between its launch and its `submit`.
        """
        assert depth >= 1, f"a depth of {depth} has no room for the step itself"
        twice = [name for other in self._steps for name in other.sequences & step.sequences]
        assert not twice, f"{twice[0]} is in two steps: the one before is drained first"
        self._steps.append(step)
        while len(self._steps) >= depth:
            self._process(self._steps[0])
        return step

    def poll(self) -> list[StepInFlight]:
        """Process, in order, the steps that are done; the first that is not ends it. Returns those processed."""
        processed = []
        while self._steps and self._steps[0].is_done():
            processed.append(self._process(self._steps[0]))
        return processed

    def drain(self, sequences: Collection[str] | None = None) -> list[StepInFlight]:
        """Process the steps that have any of these sequences, or all steps: then none of them is in flight.

        Returns those processed, in order. Steps of other sequences stay in flight.
        """
        touched = [step for step in self._steps if sequences is None or not step.sequences.isdisjoint(sequences)]
        return [self._process(step) for step in touched]

    def _process(self, step: StepInFlight) -> StepInFlight:
        """One that cannot be processed is not processed again."""
        self._steps.remove(step)
        step.process()
        return step


def with_copied_results(
    batch: ScheduleBatch, result: BatchResult, process: Callable[[ScheduleBatch, BatchResult], None]
) -> StepInFlight:
    """The step of a batch that may go on to the next one: its results are copied, and processed for its rows of now."""
    done = copy_results_to_host(batch, result)
    kept = batch.copy()
    return StepInFlight(
        sequences=frozenset(request.rid for request in kept.reqs),
        process=lambda: process(kept, result),
        is_done=done.query,
    )
