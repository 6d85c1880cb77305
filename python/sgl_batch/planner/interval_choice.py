"""Decides whether another interval, or more or fewer sequences prefilled ahead, are predicted to be surely faster.

The engine's defaults stay where predictions are too close to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sgl_batch.planner.candidate import DEVICE, Candidate
from sgl_batch.planner.schedule import Prediction

# A gain that is larger than the error between two predictions that differ in nothing else (docs/plan.md).
_SURE_SHARE = 0.05
# From what is nearest to the default on. A longer interval, or fewer sequences ahead, gain only by chance.
_INTERVALS: tuple[Any, ...] = (32, 16, 8)
_AHEAD: tuple[Any, ...] = (1.0, 2.0)
Tried = Callable[[Candidate], Prediction | None]


def settle_interval(
    candidate: Candidate, prediction: Prediction, predicted: Tried, given: Mapping[str, Any]
) -> tuple[Candidate, Prediction]:
    """Return the candidate with the interval, and the share of sequences prefilled ahead, that are surely faster.

    Args:
        candidate: The best plan with the settings in force. With a host store it stays as it is.
        prediction: Of it.
        predicted: Predicts a candidate; None where it does not fit.
        given: What the user gave, which stays.
    """
    if candidate.kv != DEVICE:
        return candidate, prediction
    for name, values in (("boundary_tokens", _INTERVALS), ("ready_ahead", _AHEAD)):
        if name not in given:
            candidate, prediction = _best(candidate, prediction, predicted, name, values)
    return candidate, prediction


def _best(
    candidate: Candidate, prediction: Prediction, predicted: Tried, name: str, values: Sequence[Any]
) -> tuple[Candidate, Prediction]:
    """Return the candidate with the first value that is surely faster and behind which all values are.

    One value alone may be faster because a few long outputs happen to begin in the right interval.
    """
    best = candidate, prediction
    for value in reversed(values):
        other = replace(candidate, **{name: value})
        time = predicted(other)
        if time is None or time.seconds > (1 - _SURE_SHARE) * prediction.seconds:
            break
        best = other, time
    return best
