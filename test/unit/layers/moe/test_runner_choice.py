"""Which runner computes a call on a GPU follows from what was measured there; without a measurement, SGLang's own."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sgl_batch.config import EXPERT_RUNNERS
from sgl_batch.layers.moe import runner_choice
from sgl_batch.layers.moe.expert_runner import ON_GPU
from sgl_batch.layers.moe.runner_choice import (
    MEASURED,
    ExpertShape,
    RunnerTable,
    fastest,
    measured_table,
    with_measurement,
)

SHAPE = ExpertShape(experts=128, hidden=2048, intermediate=768, top_k=8, dtype="bfloat16")
TABLE = RunnerTable(best=((16, "sglang"), (512, "triton"), (4096, "deepgemm")))


@pytest.mark.parametrize(
    ("tokens", "runner"),
    [(1, "sglang"), (16, "sglang"), (511, "sglang"), (512, "triton"), (4095, "triton"), (100_000, "deepgemm")],
)
def test_a_call_gets_the_runner_of_the_largest_measured_number_of_tokens_up_to_its_own(tokens, runner):
    assert TABLE.runner_for(tokens) == runner


def test_the_table_of_a_measurement_names_each_change_of_the_fastest_once():
    seconds = {
        64: {"sglang": 1.0, "triton": 2.0},
        512: {"sglang": 4.0, "triton": 3.0},
        1: {"sglang": 0.5, "triton": 0.6},
        4096: {"sglang": 9.0, "triton": 8.0},
    }
    assert fastest(seconds).best == ((1, "sglang"), (512, "triton"))


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Where measurements lie for a test."""
    found = tmp_path / "measured.json"
    monkeypatch.setattr(runner_choice, "MEASURED", found)
    return found


def test_a_measurement_is_found_again_by_gpu_and_shape_and_replaces_an_older_one(path):
    older = with_measurement([], "GPU A", SHAPE, RunnerTable(best=((0, "triton"),)), {"commit": "a"})
    entries = with_measurement(older, "GPU A", SHAPE, TABLE, {"commit": "b"})
    assert len(entries) == 1
    path.write_text(json.dumps(entries))
    assert measured_table("GPU A", SHAPE) == TABLE


@pytest.mark.parametrize(("device", "shape"), [("GPU B", SHAPE), ("GPU A", replace(SHAPE, hidden=1024))])
def test_what_was_not_measured_is_computed_by_sglang(device, shape, path):
    path.write_text(json.dumps(with_measurement([], "GPU A", SHAPE, TABLE, {})))
    assert {measured_table(device, shape).runner_for(tokens) for tokens in (0, 1, 100_000)} == {"sglang"}


def test_what_ships_names_runners_that_run_on_a_gpu():
    for entry in json.loads(MEASURED.read_text(encoding="utf-8")):
        assert {name for _, name in entry["best"]} <= set(ON_GPU)
        assert measured_table(entry["device"], ExpertShape(**entry["shape"])).best


def test_every_runner_on_a_gpu_can_be_asked_for_by_name():
    assert set(ON_GPU) < set(EXPERT_RUNNERS)
