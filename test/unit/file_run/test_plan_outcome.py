"""Predicted beside measured: the parts, their sum, and what a large difference means."""

from __future__ import annotations

import pytest

from sgl_batch.core.answers import EngineStats
from sgl_batch.file_run.plan_outcome import compare
from sgl_batch.planner.schedule import Prediction

PLANNED = {
    "source": "measured profile of 2026-01-01",
    "predicted": {"seconds": 12.5},
    "profile_again": "sgl-batch plan --model m --profile",
}
PREDICTION = Prediction(seconds=10.0, prefill_s=3.0)
PREDICTION.parts.update(attention=2.0, experts=5.0, router=0.5, step=1.5, intake=1.0)


def outcome(wall_s=11.0, prediction=PREDICTION, **counters):
    stats = EngineStats(
        part_s={"attention": 2.5, "experts": 5.5, "router": 0.5, "copies": 0.0, "sampling": 0.5, "idle": 0.4},
        counters={"prefill_us": 2_200_000, **counters},
    )
    return compare(PLANNED, prediction, stats, wall_s)


def test_each_part_stands_beside_its_prediction_and_the_parts_add_up():
    found = outcome()
    assert found.predicted == pytest.approx(
        {"prefill": 2, "decode": 8, "attention": 2, "experts": 5, "router": 0.5, "rest": 2.5, "total": 10}
    )
    assert found.measured == pytest.approx(
        {"prefill": 2.2, "decode": 8.8, "attention": 2.5, "experts": 5.5, "router": 0.5, "rest": 2.5, "total": 11}
    )
    assert found.as_dict()["before_s"] == 12.5
    assert found.lines()[:2] == [
        "Plan: measured profile of 2026-01-01",
        "Predicted and measured, for the lengths that came out (before the run: 12.5 s):",
    ]
    assert found.lines()[-1].split() == ["total", "10.00", "s", "11.00", "s", "+10%"]


def test_a_prediction_without_parts_is_compared_as_a_whole():
    found = outcome(prediction=Prediction(seconds=10.0, prefill_s=3.0))
    assert (found.predicted, found.measured) == ({"total": 10.0}, {"total": 11.0})


def test_a_large_difference_without_a_profile_to_make_again_is_only_said():
    found = compare({"source": "s"}, Prediction(seconds=10.0), EngineStats(part_s={"attention": 1.0}), 15.0)
    assert found.note == "The run took 50% longer than predicted."


@pytest.mark.parametrize(
    ("wall_s", "note"),
    [
        (12.0, ""),
        (
            13.5,
            "The run took 35% longer than predicted: make the profile again on an idle machine, with",
        ),
        (7.0, "The run took 30% less time than predicted: make the profile again"),
    ],
)
def test_a_large_difference_names_its_direction_and_the_remedy(wall_s, note):
    found = outcome(wall_s)
    assert found.note.startswith(note)
    assert bool(found.note) == bool(note)


def test_shared_prompts_explain_a_difference():
    note = outcome(5.0, prompt_tokens_shared=50, prompt_tokens=50).note
    assert note == "The run took 50% less time than predicted: that prompts share their beginnings is not predicted."


def test_without_a_prediction_only_the_source_is_said():
    found = outcome(prediction=None)
    assert found.lines() == ["Plan: measured profile of 2026-01-01"]
    assert found.measured == {}
