"""A profile of a real model: what both processes measure, and that a plan can be made of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sgl_batch.checkpoint.model_directory import model_config
from sgl_batch.planner.candidates import Allowed
from sgl_batch.planner.cost_model import fit
from sgl_batch.planner.followed_run import Room
from sgl_batch.planner.model_layers import DENSE, MOE, model_layers
from sgl_batch.planner.search import MemoryMap, search
from sgl_batch.planner.workload import parse_workload
from sgl_batch.profiler.profile import make_profile

pytestmark = pytest.mark.engine


def test_a_model_with_dense_and_moe_layers_is_profiled_and_planned(model_path: Callable[[str], str]) -> None:
    directory = Path(model_path("tiny-deepseek-v3"))
    config = model_config(str(directory))
    assert config is not None
    layers = model_layers(config, item_bytes=2, weight_bytes=2)
    found = make_profile(directory, config, layers, dtype="bfloat16", weight_dtype="auto", passes_s=1, steps_s=1)
    assert {(one.kind, one.decode) for one in found.passes} == {
        (kind, decode) for kind in (DENSE, MOE) for decode in (True, False)
    }
    assert {one.decode for one in found.steps} == {True, False}
    assert all(one.attention_s > 0 and one.experts_s + one.router_s > 0 for one in found.passes)
    assert found.rates["copy"] > 0
    memory = MemoryMap(phases={}, room=Room(device=10_000))
    workload = parse_workload("64:16x32")
    best = search(workload, fit(found, layers), layers, Allowed(cores=2), lambda _: memory).ranked[0]
    assert best.prediction.seconds > 0
