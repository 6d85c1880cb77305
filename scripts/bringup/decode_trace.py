"""Owns the figures of decode steps in a profiler's trace: launches, the host's waits, its time by layer. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_HOST = ("cpu_op", "cuda_runtime", "cuda_driver")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Averages of a decode step: kernels and graphs given to the GPU, waits of the host for it, operators of torch.

    `host_us`: microseconds that the thread which launches does not wait, by layer; all of the step is divided among
    layers, with sampling and scheduling.
    """

    kernels: float
    graphs: float
    waits: float
    operators: float
    host_us: float

    def text(self, layers: int) -> str:
        """Return the table's text."""
        return (
            f"by layer: {self.kernels / layers:.1f} launches, {self.operators / layers:.1f} operators, "
            f"{self.host_us:.0f} us of CPU; by step: {self.graphs:.1f} graphs, {self.waits:.1f} waits"
        )


def step_cost(events: Iterable[dict[str, Any]], *, steps: int, layers: int) -> StepCost | None:
    """Return the cost of a step in a trace of `steps`; None if it has no operator.

    The thread with the most operators is the one that launches.
    """
    spans = [event for event in events if event.get("ph") == "X" and event.get("cat") in _HOST]
    threads = Counter((event["pid"], event["tid"]) for event in spans if event["cat"] == "cpu_op")
    if not threads:
        return None
    launcher = threads.most_common(1)[0][0]
    own = [event for event in spans if (event["pid"], event["tid"]) == launcher]
    calls = [event for event in own if event["cat"] != "cpu_op"]
    waits = [event for event in calls if "Synchronize" in event["name"]]
    begin = min(event["ts"] for event in own)
    end = max(event["ts"] + event["dur"] for event in own)
    waited = sum(event["dur"] for event in waits)
    return StepCost(
        kernels=sum("LaunchKernel" in event["name"] for event in calls) / steps,
        graphs=sum("GraphLaunch" in event["name"] for event in calls) / steps,
        waits=len(waits) / steps,
        operators=threads[launcher] / steps,
        host_us=(end - begin - waited) / steps / layers,
    )
