"""The seconds of a pass: of prompts, the last layer's experts compute the tokens that logits are made of alone."""

from __future__ import annotations

import made_profiles as made
import pytest

from sgl_batch.planner.candidate import Candidate
from sgl_batch.planner.cost_model import fit
from sgl_batch.planner.model_layers import DENSE, MOE
from sgl_batch.planner.pass_cost import PassCost

SHARED, OWN = None, False  # the experts of a group, and of each sub-batch
LAYERS = 8


def cost_of(kind: str, accumulate: bool | None) -> PassCost:
    limits = {"b_attn_prefill": 256, "b_moe_prefill": 2048, "b_attn_decode": 16, "b_moe_decode": 16}
    layers = made.layers(kind, LAYERS)
    return PassCost(fit(made.profile(kind), layers), layers, Candidate(**limits, accumulate=accumulate), cores=4)


@pytest.mark.parametrize(("kind", "accumulate"), [(MOE, SHARED), (MOE, OWN), (DENSE, SHARED)])
def test_a_prefill_group_takes_one_layer_of_experts_less_but_for_the_read_tokens(kind, accumulate):
    cost = cost_of(kind, accumulate)
    calls = [1024] if (kind, accumulate) == (MOE, SHARED) else [256] * 4
    parts = cost.prefill([128] * 8).parts
    for name, seconds_of in (("experts", made.experts_s), ("router", made.router_s)):
        expected = (LAYERS - 1) * sum(map(seconds_of, calls)) + seconds_of(8)
        assert parts[name] == pytest.approx(expected, rel=0.1), name
    every = cost.prefill_group(1024, 8 * 129 * 64, read=1024).parts
    assert every["experts"] == pytest.approx(LAYERS * sum(map(made.experts_s, calls)), rel=0.1)
    assert every["attention"] == parts["attention"]


def test_prompts_of_one_token_and_decode_steps_read_every_row():
    cost = cost_of(MOE, SHARED)
    whole = LAYERS * made.experts_s(16)
    assert cost.prefill([1] * 16).parts["experts"] == pytest.approx(whole, rel=0.1)
    assert cost.decode(16, 100).parts["experts"] == pytest.approx(whole, rel=0.1)
