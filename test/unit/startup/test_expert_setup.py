"""How a start chooses the expert runner: two real runners are measured once, and none where none may be."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
import torch

from sgl_batch.config import from_mapping
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers.moe.cpu_experts import combined_experts
from sgl_batch.layers.packed_weights import PackedWeights
from sgl_batch.model_executor.time_budget import TimeBudget
from sgl_batch.startup import expert_setup
from sgl_batch.startup.expert_setup import ExpertSetup

NAMES = ("torch", "native")


@pytest.fixture
def runners():
    """A layer's experts by torch's operators and by our kernels, and calls of each runner."""
    layer = SimpleNamespace(w13_weight=torch.randn(4, 64, 32), w2_weight=torch.randn(4, 32, 32), top_k=2)
    packed, w13, w2 = PackedWeights(native_kernels()), layer.w13_weight.clone(), layer.w2_weight.clone()
    packed.add_experts(w13, w2)
    calls = []

    def call_of(name):
        def call(layer, x, weights, ids):
            calls.append((name, len(x)))
            if name == "native":
                return packed.experts(x, w13, w2, weights, ids)[0]
            if name == "broken":
                raise RuntimeError("no kernel image\nand more")
            return combined_experts(x, layer.w13_weight, layer.w2_weight, weights, ids)[0]

        return call

    return SimpleNamespace(layers=[layer], call_of=call_of, calls=calls)


@pytest.fixture
def settled(tmp_path, monkeypatch, runners):
    monkeypatch.setattr(expert_setup, "choice_directory", lambda: tmp_path)

    def settle(names=NAMES, *, deterministic=False, num_ranks=1, budget_s=20.0, **flags):
        runners.calls.clear()
        in_force = PlanInForce(from_mapping({"b_moe_decode": 32, "b_attn_decode": 8, "b_moe_prefill": 128, **flags}))
        in_force.fit(page_size=64, max_running=32, can_reenter=True)
        args = SimpleNamespace(model_path="tiny", enable_deterministic_inference=deterministic)
        setup = ExpertSetup(
            device="GPU A", in_force=in_force, server_args=args, budget=TimeBudget(budget_s), num_ranks=num_ranks
        )
        return setup(runners.layers, names, runners.call_of)

    return settle


def test_runners_are_measured_at_the_plans_group_sizes_once_for_a_gpu_and_model(settled, runners):
    choice = settled()
    assert {tokens for _, tokens in runners.calls} == {2, 32, 128}
    assert set(choice.numbers) == {"torch", "native", "tokens"}
    assert "differs" not in choice.why
    again = settled()
    assert (again.mode, again.numbers, runners.calls) == (choice.mode, choice.numbers, [])
    assert again.why == f"{choice.why} (settled at an earlier start)"
    settled(b_moe_decode=16)
    assert {tokens for _, tokens in runners.calls} == {1, 16, 128}, "other groups are measured by themselves"


def test_a_runner_that_fails_is_left_out_with_one_line(settled, caplog):
    with caplog.at_level(logging.WARNING):
        choice = settled(("torch", "broken"))
    assert choice.mode == "torch"
    assert choice.why.endswith("; broken failed: RuntimeError: no kernel image")
    assert [record.getMessage() for record in caplog.records] == [
        "experts are not computed by 'broken', which failed in the self-check: RuntimeError: no kernel image"
    ]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"deterministic": True}, "the deterministic mode never switches by time"),
        ({"num_ranks": 2}, "several ranks measure no expert runners"),
        ({"names": ("torch",)}, "no other expert runner is installed"),
    ],
)
def test_nothing_is_measured_where_the_runner_may_not_change(settled, runners, how, reason):
    choice = settled(**how)
    assert (choice.mode, choice.why, runners.calls) == ("torch", f"torch: {reason}", [])


def test_without_time_the_first_runner_computes_and_no_choice_is_cached(settled, tmp_path):
    assert settled(budget_s=0.0).why == (
        "torch: it was not measured: the time was up, and others are compared with it alone"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_table_of_an_earlier_start_is_taken_over_where_its_runners_are_installed(settled, runners):
    def earlier(mode):
        return json.dumps({"expert_runner": {"mode": mode, "why": "it was faster", "numbers": {}}})

    choice = settled(start_choices=earlier("torch, native from 64 tokens"))
    assert (choice.mode, runners.calls) == ("torch, native from 64 tokens", [])
    assert choice.why == "it was faster (settled at an earlier start)"
    for gone in ("torch, deepgemm from 64 tokens", "torch from here"):
        assert "deepgemm" not in settled(start_choices=earlier(gone)).mode
