"""Blocks of experts on a CPU: routed ones scaled, shared ones added once, one rounding, one rank or several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from sgl_batch.errors import ConfigError
from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers.moe import cpu_topk
from sgl_batch.layers.moe.token_dispatcher.local import LocalDispatcher
from sgl_batch.layers.packed_weights import PackedWeights
from sgl_batch.metrics.counters import Counters
from sgl_batch.model_executor.cpu_blocks import CpuBlocks
from sgl_batch.model_executor.expert_exchange import ExpertExchange
from sgl_batch.model_executor.families import CommunicatingFamily, DeepseekFamily, Qwen2MoeFamily

HIDDEN, WIDTH, EXPERTS, TOP_K, SCALE, ROWS = 16, 6, 8, 3, 1.5, 7


def drawn(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter((torch.randn(*shape) / shape[-1] ** 0.5).to(dtype), requires_grad=False)


# SGLang's classes are known by their names.
class DeepseekV2MLP(nn.Module):
    weight_dtype: torch.dtype | None = None

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Module(), nn.Module()
        self.gate_up_proj.weight = drawn(2 * WIDTH, HIDDEN, dtype=self.weight_dtype or dtype)
        self.down_proj.weight = drawn(HIDDEN, WIDTH, dtype=dtype)


class MoEGate(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = drawn(EXPERTS, HIDDEN, dtype=dtype)


class TopK(nn.Module):
    layer_id, waterfill_balancer, enable_waterfill = 0, None, False
    topk_config = SimpleNamespace(
        use_grouped_topk=False,
        top_k=TOP_K,
        scoring_func="softmax",
        correction_bias=None,
        custom_routing_function=None,
        num_fused_shared_experts=0,
        apply_routed_scaling_factor_on_output=False,
        renormalize=False,
        allow_routed_experts_capture=True,
    )

    def __init__(self, operators: str) -> None:
        super().__init__()
        self.kernels = native_kernels() if operators == "native" else None

    def forward(self, hidden: torch.Tensor, logits: torch.Tensor) -> Any:
        return cpu_topk.choose(self.kernels, self, hidden, logits)


class Experts(nn.Module):
    top_k, num_experts = TOP_K, EXPERTS

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w13, self.w2 = drawn(EXPERTS, 2 * WIDTH, HIDDEN, dtype=dtype), drawn(EXPERTS, HIDDEN, WIDTH, dtype=dtype)


class DeepseekV2MoE(nn.Module):
    routed_scaling_factor = SCALE

    def __init__(self, operators: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate, self.topk, self.experts = MoEGate(dtype), TopK(operators), Experts(dtype)
        self.shared_experts = DeepseekV2MLP(dtype)

    def weight_of_shared(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(x), 1)


class Qwen2MoeMLP(DeepseekV2MLP):
    pass


class Qwen2MoeSparseMoeBlock(nn.Module):
    routed_scaling_factor = 1.0

    def __init__(self, operators: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate, self.topk, self.experts = MoEGate(dtype), TopK(operators), Experts(dtype)
        self.shared_expert = Qwen2MoeMLP(dtype)
        self.shared_expert_gate = nn.Linear(HIDDEN, 1, bias=False, dtype=dtype)

    @property
    def shared_experts(self) -> Qwen2MoeMLP:
        return self.shared_expert

    def weight_of_shared(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x @ self.shared_expert_gate.weight.double().T)


FAMILIES: dict[str, tuple[type[Any], CommunicatingFamily]] = {
    "deepseek": (DeepseekV2MoE, DeepseekFamily()),
    "qwen2": (Qwen2MoeSparseMoeBlock, Qwen2MoeFamily()),
}


class Blocks:
    """A model of one block of experts that CpuBlocks has adopted, a plain copy of it, and rows for both."""

    def __init__(self, family: str, operators: str, dtype: torch.dtype, **config: Any) -> None:
        block, self.family = FAMILIES[family]
        torch.manual_seed(0)
        self.plain = block(operators, dtype)
        torch.manual_seed(0)
        self.moe = block(operators, dtype)
        self.hidden = torch.randn(ROWS, HIDDEN).to(dtype)
        kernels = native_kernels() if operators == "native" else None
        self.weights = PackedWeights(kernels)
        self.weights.add_experts(self.moe.experts.w13, self.moe.experts.w2)
        self.counters = Counters()
        model = nn.Module()
        model.layers, model.config = nn.ModuleList([self.moe]), SimpleNamespace(**config)
        CpuBlocks(self.family, self.weights, self.call_experts, self.counters).adopt(model)

    def call_experts(
        self, experts: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *, f32_output: bool = False
    ) -> torch.Tensor:
        return self.weights.experts(x, experts.w13, experts.w2, weights, ids, f32_output=f32_output)[0]

    def expected(self) -> torch.Tensor:
        """In float64: every chosen expert by its score, scaled; and the shared experts, weighted."""
        x, block = self.hidden.double(), self.plain
        scores = (x @ block.gate.weight.double().T).softmax(-1)
        shared = mlp(x, block.shared_experts.gate_up_proj.weight, block.shared_experts.down_proj.weight)
        out = shared * block.weight_of_shared(x)
        for row, ids in enumerate(scores.topk(TOP_K).indices):
            for i in ids:
                weight = block.routed_scaling_factor * scores[row, i]
                out[row] += weight * mlp(x[row], block.experts.w13[i], block.experts.w2[i])
        return out


def mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ gate_up.double().T).chunk(2, -1)
    return (functional.silu(gate) * up) @ down.double().T


families = pytest.mark.parametrize("family", FAMILIES)
operators = pytest.mark.parametrize("operators", ["native", "torch"])
dtypes = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)], ids=str)


@families
@operators
@dtypes
def test_routed_experts_are_scaled_and_shared_ones_added(family, operators, dtype, tolerance):
    blocks = Blocks(family, operators, dtype)
    out = blocks.moe(blocks.hidden, "batch")
    assert out.dtype == dtype
    assert torch.allclose(out.double(), blocks.expected(), rtol=tolerance, atol=tolerance)


@families
@operators
@dtypes
def test_the_exchange_gives_the_bits_of_the_block_itself(family, operators, dtype, tolerance):
    blocks = Blocks(family, operators, dtype)
    dispatcher = LocalDispatcher(num_experts=EXPERTS, hidden_size=HIDDEN)
    exchange = ExpertExchange(dispatcher, blocks.call_experts, blocks.counters)
    layer = SimpleNamespace(mlp=blocks.moe)
    through = exchange.run(blocks.family, layer, blocks.hidden, "batch")
    assert torch.equal(through, blocks.moe(blocks.hidden, "batch"))
    if operators == "native":
        alone = [blocks.moe(blocks.hidden[row : row + 1], "batch") for row in range(ROWS)]
        assert torch.equal(through, torch.cat(alone)), "a row has the same bits whatever the other rows are"
    assert exchange.run(blocks.family, layer, blocks.hidden[:0], "batch").shape == (0, HIDDEN)


@operators
@dtypes
def test_a_dense_layer_is_a_single_expert_and_does_not_count_as_an_expert_call(operators, dtype, tolerance):
    blocks = Blocks("deepseek", operators, dtype)
    dense = blocks.plain.shared_experts
    expected = mlp(blocks.hidden.double(), dense.gate_up_proj.weight, dense.down_proj.weight)
    out = blocks.moe.shared_experts(blocks.hidden, "batch")
    assert torch.allclose(out.double(), expected, rtol=tolerance, atol=tolerance)
    assert blocks.counters.as_dict()["counters"] == {}
    assert blocks.counters.clock.read()["experts"] > 0


def test_every_multiplied_weight_is_packed_once():
    blocks = Blocks("deepseek", "native", torch.bfloat16)
    assert len(blocks.weights) == 5, "the router, and two weights each of routed and shared experts"
    assert blocks.moe.gate.weight in blocks.weights
    blocks = Blocks("qwen2", "native", torch.bfloat16)
    assert len(blocks.weights) == 6, "the shared expert's gate as well"


@pytest.mark.parametrize("option", ["index_topk", "swiglu_limit", "llama_4_scaling", "quantization_config"])
def test_options_that_are_not_computed_are_refused_by_name(option):
    with pytest.raises(ConfigError, match=rf"this model asks for {option}=2048$"):
        Blocks("deepseek", "native", torch.bfloat16, **{option: 2048})


def test_weights_that_are_rounded_as_they_are_loaded_are_refused(monkeypatch):
    monkeypatch.setattr(DeepseekV2MLP, "weight_dtype", torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match=r"this model asks for weights of torch.float8_e4m3fn$"):
        Blocks("qwen2", "native", torch.bfloat16)
