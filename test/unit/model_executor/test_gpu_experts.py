"""On a GPU the chosen or measured runner computes a layer's calls, and SGLang's own computes the others."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from sgl_batch.core.start_choices import Choice
from sgl_batch.errors import ConfigError
from sgl_batch.layers.moe import expert_runner
from sgl_batch.layers.moe.cpu_experts import combined_experts
from sgl_batch.metrics.counters import Counters
from sgl_batch.model_executor.gpu_experts import GpuExperts
from sgl_batch.sglang_adapter.layers import UnquantizedFusedMoEMethod

EXPERTS, HIDDEN, WIDTH, TOP_K = 4, 16, 8, 2
OWN = object()


def experts_layer(**config):
    """A module with what SGLang's layer of experts has; its own runner answers with OWN."""
    layer = torch.nn.Module()
    generator = torch.Generator().manual_seed(0)
    layer.w13_weight = torch.nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator), False)
    layer.w2_weight = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator), False)
    layer.top_k = TOP_K
    method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
    torch.nn.Module.__init__(method)
    method.apply = lambda layer, dispatch_output: OWN
    plain = {"activation": "silu", "apply_router_weight_on_input": False, "routed_scaling_factor": None}
    plain |= {"gemm1_alpha": None, "gemm1_clamp_limit": None, "gate_up_interleaved": True}
    method.moe_runner_config = SimpleNamespace(**{**plain, **config})
    layer.quant_method = method
    layer.run_moe_core = lambda given: layer.quant_method.apply(layer, given)
    return layer


def dispatched(tokens):
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)])
    topk = (torch.rand(tokens, TOP_K), ids, None)
    return SimpleNamespace(hidden_states=torch.randn(tokens, HIDDEN), topk_output=topk)


def model_of(*layers):
    return torch.nn.ModuleList(layers)


def expected(layer, given):
    weights, ids, _ = given.topk_output
    return combined_experts(given.hidden_states, layer.w13_weight, layer.w2_weight, weights, ids)[0]


def test_a_runner_that_is_asked_for_computes_every_call_of_every_layer():
    layers = experts_layer(), experts_layer()
    experts = GpuExperts("torch", Counters(), unmeasured)
    assert experts.expert_runner == "torch", "the memory of passes is computed before a model is adopted"
    experts.adopt(model_of(*layers))
    for layer in layers:
        given = dispatched(5)
        assert torch.equal(layer.run_moe_core(given).hidden_states, expected(layer, given))
    assert experts.expert_runner == "torch"


def test_on_several_ranks_its_sums_are_in_float32():
    layer, given = experts_layer(), dispatched(5)
    experts = GpuExperts("torch", Counters(), unmeasured)
    experts.adopt(model_of(layer))
    weights, ids, _ = given.topk_output
    sums = experts.call_experts(layer, given.hidden_states, weights, ids, f32_output=True)
    assert sums.dtype == torch.float32
    assert torch.equal(sums, expected(layer, given))


def unmeasured(_layers, names, _call_of):
    return Choice(mode=names[0], why=f"{names[0]}: the time was up")


@pytest.mark.parametrize("name", ["auto", "sglang"])
def test_without_a_measurement_sglangs_own_runner_computes(name):
    layer = experts_layer()
    experts = GpuExperts(name, Counters(), unmeasured)
    experts.adopt(model_of(layer))
    assert layer.run_moe_core(dispatched(3)) is OWN
    assert experts.expert_runner == experts.choice.mode == "sglang"


def test_the_chosen_table_of_runners_decides_by_the_number_of_tokens():
    layer, called = experts_layer(), {}

    def settle(layers, names, call_of):
        given = dispatched(5)
        rows, (weights, ids, _) = given.hidden_states, given.topk_output
        called.update({"names": names, "torch": call_of("torch")(layers[0], rows, weights, ids)})
        with pytest.raises(AttributeError, match="hidden_states"):  # of OWN
            call_of("sglang")(layers[0], rows, weights, ids)
        assert torch.equal(called["torch"], expected(layers[0], given))
        return Choice(mode="sglang, torch from 8 tokens", why="it was measured")

    experts = GpuExperts("auto", Counters(), settle)
    experts.adopt(model_of(layer))
    assert set(called["names"]) <= {"sglang", "triton"}, "deepgemm computes in bfloat16"
    assert layer.run_moe_core(dispatched(7)) is OWN
    given = dispatched(8)
    assert torch.equal(layer.run_moe_core(given).hidden_states, expected(layer, given))
    assert (experts.expert_runner, experts.choice.why) == ("sglang, torch from 8 tokens", "it was measured")


@pytest.mark.parametrize("clamped", [False, True])
def test_a_runner_without_biases_is_not_measured_for_experts_that_have_them(clamped, monkeypatch):
    monkeypatch.setattr(expert_runner, "_is_there", lambda package: True)
    layer, found = experts_layer(**({"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0} if clamped else {})), []
    layer.to(torch.bfloat16)
    if clamped:
        layer.w13_weight_bias, layer.w2_weight_bias = torch.zeros(EXPERTS, 2 * WIDTH), torch.zeros(EXPERTS, HIDDEN)

    def settle(layers, names, call_of):
        found.extend(names)
        return unmeasured(layers, names, call_of)

    GpuExperts("auto", Counters(), settle).adopt(model_of(layer))
    assert found == ["sglang", "triton", *([] if clamped else ["deepgemm"])]


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"activation": "gelu"}, "activation='gelu'"), ({"routed_scaling_factor": 2.5}, "scaled by 2.5")],
)
def test_experts_that_our_runners_cannot_compute_are_refused_or_left_to_sglang_with_a_warning(config, reason, caplog):
    layer = experts_layer(**config)
    with pytest.raises(ConfigError, match=f"expert_runner is 'torch': .*{reason}.*; choose auto or sglang"):
        GpuExperts("torch", Counters(), unmeasured).adopt(model_of(layer))
    with caplog.at_level(logging.WARNING):
        experts = GpuExperts("auto", Counters(), unmeasured)
        experts.adopt(model_of(layer))
    assert reason in caplog.text
    assert reason in experts.choice.why
    assert layer.run_moe_core(dispatched(20)) is OWN


def test_a_model_without_unquantised_experts_uses_none_of_our_runners():
    GpuExperts("auto", Counters(), unmeasured).adopt(model_of(torch.nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match="this model has no unquantised experts"):
        GpuExperts("triton", Counters(), unmeasured).adopt(model_of(torch.nn.Linear(2, 2)))


def test_weights_in_another_order_are_refused():
    layer = experts_layer()
    layer.w2_weight = torch.nn.Parameter(layer.w2_weight.transpose(1, 2).contiguous(), False)
    with pytest.raises(ConfigError, match="packed weights"):
        GpuExperts("torch", Counters(), unmeasured).adopt(model_of(layer))
