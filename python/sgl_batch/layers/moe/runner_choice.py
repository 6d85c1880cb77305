"""Owns which expert runner computes a call on a GPU: the one that was fastest there, by shape and number of tokens.

The measurements lie in measured_runners.json, which `benchmark/expert_runners.py --write` fills. For a GPU or a shape
that is not in it, SGLang's own fused experts compute every call. No GPU has been measured yet.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MEASURED = Path(__file__).with_name("measured_runners.json")
# What computes where nothing is measured.
UNMEASURED = "sglang"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """What decides, beside the number of tokens, which runner is the fastest. `dtype`: without torch's prefix."""

    experts: int
    hidden: int
    intermediate: int
    top_k: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerTable:
    """Runners by the number of tokens from which they are the fastest, ascending."""

    best: tuple[tuple[int, str], ...]

    def runner_for(self, num_tokens: int) -> str:
        """The runner of a call; fewer tokens than were measured get the first."""
        found = self.best[0][1]
        for from_tokens, name in self.best:
            if num_tokens >= from_tokens:
                found = name
        return found


def fastest(seconds: Mapping[int, Mapping[str, float]]) -> RunnerTable:
    """The table of a measurement: for each number of tokens, each runner's time."""
    best: list[tuple[int, str]] = []
    for tokens in sorted(seconds):
        name = min(seconds[tokens], key=seconds[tokens].__getitem__)
        if not best or best[-1][1] != name:
            best.append((tokens, name))
    return RunnerTable(best=tuple(best))


def measured_table(device: str, shape: ExpertShape) -> RunnerTable:
    """The table of a GPU and a shape."""
    for entry in json.loads(MEASURED.read_text(encoding="utf-8")):
        if entry["device"] == device and entry["shape"] == asdict(shape):
            return RunnerTable(best=tuple((int(tokens), str(name)) for tokens, name in entry["best"]))
    return RunnerTable(best=((0, UNMEASURED),))


def with_measurement(
    entries: Iterable[dict[str, Any]], device: str, shape: ExpertShape, table: RunnerTable, source: Mapping[str, object]
) -> list[dict[str, Any]]:
    """The measurements with a new one, in place of an older of its GPU and shape. `source`: commit and versions."""
    others = [entry for entry in entries if (entry["device"], entry["shape"]) != (device, asdict(shape))]
    return [*others, {"device": device, "shape": asdict(shape), "best": table.best, "source": dict(source)}]
