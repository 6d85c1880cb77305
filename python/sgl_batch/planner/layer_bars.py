"""Lays the graph of a few layers out in time: which work runs on which stream when, and what everything waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_batch.planner.critical_path import critical_path, start_times
from sgl_batch.planner.layer_dag import NOTHING, LayerWork, build, layer_time

PICTURED_LAYERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A piece of work. `layer`: from 0 on; `critical`: whether it lies on the longest chain through all layers."""

    stream: str
    kind: str
    layer: int
    start_s: float
    seconds: float
    critical: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPicture:
    """The first layers of a pass.

    `layer_s`: what each further layer takes in the steady state. `notes`: why that may be longer than what is shown.
    """

    title: str
    bars: Sequence[Bar]
    layer_s: float
    notes: Sequence[str] = ()

    @property
    def end_s(self) -> float:
        """Return when the last bar ends."""
        return max((bar.start_s + bar.seconds for bar in self.bars), default=0.0)


def pass_picture(title: str, work: LayerWork, num_layers: int = PICTURED_LAYERS) -> PassPicture:
    """Return the first `num_layers` layers of a pass whose layers all have this work; work of no time is left out."""
    graph = build(work, num_layers)
    starts, critical = start_times(graph), set(critical_path(graph).nodes)
    bars = [
        Bar(
            stream=node.stream,
            kind=node.kind,
            layer=node.layer,
            start_s=starts[index],
            seconds=node.seconds,
            critical=index in critical,
        )
        for index, node in enumerate(graph)
        if node.seconds > 0
    ]
    return PassPicture(title=title, bars=bars, layer_s=layer_time(work).seconds, notes=_notes(work))


def _notes(work: LayerWork) -> list[str]:
    if work.copy_cores and work.copies:
        return ["Copies take cores from computation: a layer takes no less than all its work divided by the cores."]
    restored = any(sub.restore is not NOTHING for sub in work.sub_batches)
    if restored and work.fetch is not NOTHING:
        return ["KV and weights come over one link: a layer takes no less than both together."]
    return []
