"""On a GPU the runner that is asked for, or was measured, gets a layer's calls, and SGLang's own the rest."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
import torch

from sgl_batch.errors import ConfigError
from sgl_batch.layers.moe import runner_choice
from sgl_batch.layers.moe.cpu_experts import combined_experts
from sgl_batch.layers.moe.runner_choice import RunnerTable, with_measurement
from sgl_batch.model_executor.counters import Counters
from sgl_batch.model_executor.gpu_experts import GpuExperts, shape_of
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
    experts = GpuExperts("torch", "GPU A", Counters())
    experts.adopt(model_of(*layers))
    for layer in layers:
        given = dispatched(5)
        assert torch.equal(layer.run_moe_core(given).hidden_states, expected(layer, given))
    assert experts.expert_runner == "torch"


def test_on_several_ranks_its_sums_are_in_float32():
    layer, given = experts_layer(), dispatched(5)
    experts = GpuExperts("torch", "GPU A", Counters())
    experts.adopt(model_of(layer))
    weights, ids, _ = given.topk_output
    sums = experts.expert_sums(layer, given.hidden_states, weights, ids)
    assert sums.dtype == torch.float32
    assert torch.equal(sums, expected(layer, given))


@pytest.mark.parametrize("name", ["auto", "sglang"])
def test_without_a_measurement_sglangs_own_computes(name):
    layer = experts_layer()
    experts = GpuExperts(name, "GPU A", Counters())
    experts.adopt(model_of(layer))
    assert layer.run_moe_core(dispatched(3)) is OWN
    assert experts.expert_runner == "sglang"


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A measurement of the layers' shape on GPU A: torch's is the fastest from 8 tokens on."""
    table = RunnerTable(best=((1, "sglang"), (8, "torch")))
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(with_measurement([], "GPU A", shape_of(experts_layer()), table, {})))
    monkeypatch.setattr(runner_choice, "MEASURED", path)


@pytest.mark.usefixtures("measured")
def test_a_measurement_decides_by_the_number_of_tokens():
    layer = experts_layer()
    experts = GpuExperts("auto", "GPU A", Counters())
    experts.adopt(model_of(layer))
    assert layer.run_moe_core(dispatched(7)) is OWN
    given = dispatched(8)
    assert torch.equal(layer.run_moe_core(given).hidden_states, expected(layer, given))
    assert experts.expert_runner == "sglang from 1 tokens, torch from 8 tokens"


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"activation": "gelu"}, "activation='gelu'"), ({"routed_scaling_factor": 2.5}, "scaled by 2.5")],
)
@pytest.mark.usefixtures("measured")
def test_what_no_runner_of_ours_computes_is_refused_or_left_to_sglang_with_a_warning(config, reason, caplog):
    layer = experts_layer(**config)
    with pytest.raises(ConfigError, match=f"expert_runner is 'torch': .*{reason}.*; choose auto or sglang"):
        GpuExperts("torch", "GPU A", Counters()).adopt(model_of(layer))
    with caplog.at_level(logging.WARNING):
        GpuExperts("auto", "GPU A", Counters()).adopt(model_of(layer))
    assert reason in caplog.text
    assert layer.run_moe_core(dispatched(20)) is OWN


def test_a_model_without_unquantised_experts_takes_no_runner_of_ours():
    GpuExperts("auto", "GPU A", Counters()).adopt(model_of(torch.nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match="this model has no unquantised experts"):
        GpuExperts("triton", "GPU A", Counters()).adopt(model_of(torch.nn.Linear(2, 2)))


def test_weights_in_another_order_are_refused():
    layer = experts_layer()
    layer.w2_weight = torch.nn.Parameter(layer.w2_weight.transpose(1, 2).contiguous(), False)
    with pytest.raises(ConfigError, match="biases or packed weights"):
        GpuExperts("torch", "GPU A", Counters()).adopt(model_of(layer))
