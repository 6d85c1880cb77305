"""Models get, before they are built and loaded, what their checkpoints' configs ask for and SGLang reads otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.model_loader.loader as loader
import torch
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config, MiniMaxM2Config, OlmoeConfig

from sgl_batch.errors import ConfigError
from sgl_batch.sglang_adapter.model_forms import models_as_configured


class Glm4MoeForCausalLM(nn.Module):
    """A model of one layer with a router that keeps its first weights, and one without experts."""

    def __init__(self) -> None:
        super().__init__()
        gate = nn.Linear(4, 3, bias=False)
        kept = gate.weight.clone()
        gate.forward = lambda hidden: hidden @ kept.T
        self.model = SimpleNamespace(
            layers=[SimpleNamespace(mlp=SimpleNamespace()), SimpleNamespace(mlp=SimpleNamespace(gate=gate))]
        )


def built(config: Any, model: Any, monkeypatch: pytest.MonkeyPatch, architecture: str = "") -> Any:
    """Return the model of SGLang's loader inside `models_as_configured`; outside it would be `model`."""
    monkeypatch.setattr(loader, "_initialize_model", lambda *_: model)
    config.architectures = [architecture or type(model).__name__]
    own = loader._initialize_model
    with models_as_configured():
        made = loader._initialize_model(SimpleNamespace(hf_config=config), "load_config")
    assert loader._initialize_model is own
    return made


def test_a_config_of_transformers_gets_the_options_of_the_models_own_config(monkeypatch):
    rope = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
    minimax = MiniMaxM2Config(rope_parameters=rope)
    built(minimax, None, monkeypatch, "MiniMaxM2ForCausalLM")
    assert (minimax.rotary_dim, minimax.scoring_func, minimax.use_qk_norm, minimax.use_routing_bias) == (
        64,
        "sigmoid",
        True,
        True,
    )
    minimax = MiniMaxM2Config(rotary_dim=32, use_routing_bias=False)
    built(minimax, None, monkeypatch, "MiniMaxM2ForCausalLM")
    assert (minimax.rotary_dim, minimax.use_routing_bias) == (32, False), "values of the config are kept"
    deepseek = DeepseekV3Config()
    built(deepseek, None, monkeypatch, "DeepseekV3ForCausalLM")
    assert (deepseek.topk_method, deepseek.scoring_func, deepseek.n_group) == ("noaux_tc", "sigmoid", 8)
    lite = DeepseekV2Config()
    built(lite, None, monkeypatch, "DeepseekV2ForCausalLM")
    assert (lite.topk_method, lite.scoring_func, lite.n_group, lite.topk_group) == ("greedy", "softmax", 1, 1)


def test_options_that_are_not_computed_are_refused_by_name(monkeypatch):
    with pytest.raises(ConfigError, match=r"clip_qkv is 8\.0 in the model's config"):
        built(OlmoeConfig(clip_qkv=8.0), None, monkeypatch, "OlmoeForCausalLM")


def test_a_router_reads_the_weights_that_are_loaded_later(monkeypatch):
    model = built(SimpleNamespace(), Glm4MoeForCausalLM(), monkeypatch)
    gate = model.model.layers[1].mlp.gate
    hidden = torch.randn(2, 4, dtype=torch.bfloat16)
    for _ in range(2):
        gate.weight.data = torch.randn(3, 4).to(torch.bfloat16)
        logits = gate(hidden)
        assert logits.dtype == torch.float32
        assert torch.allclose(logits, hidden.float() @ gate.weight.float().T)


class GptOssForCausalLM(nn.Module):
    """A model of one layer, whose rank holds the second two of four experts."""

    def __init__(self) -> None:
        super().__init__()
        layer, attention, experts = nn.Module(), nn.Module(), nn.Module()
        attention.sinks = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16), requires_grad=False)
        experts.moe_ep_rank, experts.num_local_experts = 1, 2
        experts.w2_weight_bias = nn.Parameter(torch.zeros(2, 3), requires_grad=False)
        experts.w2_weight_bias.weight_loader = lambda parameter, loaded, name, shard_id: parameter.data.copy_(loaded)
        layer.self_attn, layer.mlp = attention, SimpleNamespace(experts=experts)
        self.model = SimpleNamespace(layers=[layer])
        self.loaded: list[list[str]] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loaded.append([name for name, _ in weights])


def test_gpt_oss_loads_a_tensor_before_the_next_one_is_read(monkeypatch):
    model = built(SimpleNamespace(dtype=torch.bfloat16), GptOssForCausalLM(), monkeypatch)
    read: list[str] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "b", "c"):
            assert model.loaded == [[one] for one in read]
            read.append(name)
            yield name, torch.zeros(1)

    model.load_weights(weights())
    assert model.loaded == [["a"], ["b"], ["c"]]


def test_gpt_oss_loads_exact_sinks_and_a_ranks_own_experts_in_the_number_type_that_is_asked_for(monkeypatch):
    config = SimpleNamespace(dtype=torch.bfloat16)
    model = built(config, GptOssForCausalLM(), monkeypatch)
    assert config.dtype == torch.get_default_dtype()
    layer = model.model.layers[0]
    assert layer.self_attn.sinks.dtype == torch.float32
    bias = layer.mlp.experts.w2_weight_bias
    bias.weight_loader(bias, torch.arange(12.0).view(4, 3), "w2_weight_bias", shard_id="w2")
    assert bias.tolist() == [[6.0, 7.0, 8.0], [9.0, 10.0, 11.0]]
