"""Compares the time that the planner predicts for a run with the time that it took, part by part. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sgl_batch.core.answers import EngineStats
from sgl_batch.planner.pass_cost import INTAKE, NEW_MEMORY
from sgl_batch.planner.schedule import Prediction

# The parts that both the planner and the engine's clock name. The rest is scheduling, logits, sampling and messages.
_PARTS = ("attention", "experts", "router", "copies", "weights")
_TOTAL = "total"
_FAR = 0.2
_MUCH_SHARED = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutcome:
    """Where a run's plan was from, and what became of its prediction.

    Attributes:
        source: Where the sizes are from.
        before_s: Seconds that were predicted before the run, for estimated lengths; None without a prediction.
        predicted, measured: Seconds by part, for the lengths that came out; empty without a prediction.
        note: What a large difference means; empty for a small one.
    """

    source: str
    before_s: float | None = None
    predicted: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON for a manifest."""
        return {
            "before_s": self.before_s,
            "predicted_s": {part: round(seconds, 3) for part, seconds in self.predicted.items()},
            "measured_s": {part: round(seconds, 3) for part, seconds in self.measured.items()},
            "note": self.note,
        }

    def lines(self) -> list[str]:
        """Return it as lines for a terminal."""
        lines = [f"Plan: {self.source}"]
        if self.measured:
            before = "" if self.before_s is None else f" (before the run: {self.before_s:,.1f} s)"
            lines.append(f"Predicted and measured, for the lengths that came out{before}:")
            for part, measured_s in self.measured.items():
                predicted_s = self.predicted[part]
                change = f"{round(measured_s / predicted_s - 1, 2) + 0.0:>+8.0%}" if predicted_s > 0 else ""
                lines.append(f"  {part:<12} {predicted_s:>10.2f} s  {measured_s:>10.2f} s {change}".rstrip())
        return [*lines, self.note] if self.note else lines


def compare(
    planned: Mapping[str, Any], prediction: Prediction | None, stats: EngineStats, wall_s: float
) -> PlanOutcome:
    """Return the outcome of a completed run.

    Args:
        planned: What the manifest says about the plan (`StartPlan.as_dict`).
        prediction: Of the lengths that came out; None where there is none. One without parts is compared as a whole.
        stats: What the engine counted during the run.
        wall_s: Seconds of the run.
    """
    source = str(planned.get("source", ""))
    if prediction is None or not stats.part_s:
        return PlanOutcome(source=source)
    if prediction.parts:
        predicted, measured = _predicted(prediction), _measured(stats, wall_s)
    else:
        predicted, measured = {_TOTAL: prediction.seconds}, {_TOTAL: wall_s}
    shown = [part for part in measured if predicted[part] >= 0.005 or measured[part] >= 0.005 or part == _TOTAL]
    return PlanOutcome(
        source=source,
        before_s=(planned.get("predicted") or {}).get("seconds"),
        predicted={part: predicted[part] for part in shown},
        measured={part: measured[part] for part in shown},
        note=_note(measured[_TOTAL] / max(predicted[_TOTAL], 1e-9) - 1, stats, str(planned.get("profile_again", ""))),
    )


def _predicted(prediction: Prediction) -> dict[str, float]:
    prefill_s = prediction.prefill_s - prediction.parts[INTAKE]
    # Attention writes KV: what it waits for memory is in its measured time.
    attention_s = prediction.parts["attention"] + prediction.parts[NEW_MEMORY]
    return _by_part({**prediction.parts, "attention": attention_s}, prefill_s, prediction.seconds)


def _measured(stats: EngineStats, wall_s: float) -> dict[str, float]:
    return _by_part(stats.part_s, stats.counters.get("prefill_us", 0) / 1e6, wall_s)


def _by_part(part_s: Mapping[str, float], prefill_s: float, total_s: float) -> dict[str, float]:
    """Return the seconds of prefill passes and of all else, the same seconds by part, and their sum."""
    parts = {part: part_s.get(part, 0.0) for part in _PARTS}
    rest_s = total_s - sum(parts.values())
    return {"prefill": prefill_s, "decode": total_s - prefill_s, **parts, "rest": rest_s, _TOTAL: total_s}


def _note(difference: float, stats: EngineStats, again: str) -> str:
    if abs(difference) <= _FAR:
        return ""
    how = f"{difference:.0%} longer" if difference > 0 else f"{-difference:.0%} less time"
    shared, computed = (stats.counters.get(name, 0) for name in ("prompt_tokens_shared", "prompt_tokens"))
    if shared > _MUCH_SHARED * (shared + computed):
        return f"The run took {how} than predicted: that prompts share their beginnings is not predicted."
    remedy = f": make the profile again on an idle machine, with {again}" if again else ""
    return f"The run took {how} than predicted{remedy or '.'}"
