"""The device memory of a model follows from the model, or from its configuration."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import DeepseekV3Config, Glm4MoeConfig, MiniMaxM2Config, OlmoeConfig, Qwen2MoeConfig

from sgl_batch.core.gpu_reserves import GpuReading
from sgl_batch.memory.gpu_memory import read_gpu
from sgl_batch.model_executor.device_needs import gpu_use, model_shape, resident_weight_bytes


class Model(torch.nn.Module):
    """Two linear layers, of which one is a router, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(100, 8, dtype=torch.bfloat16)
        self.up = torch.nn.Linear(8, 16, bias=True, dtype=torch.bfloat16)
        self.mlp = torch.nn.ModuleDict({"gate": torch.nn.Linear(8, 4, bias=False, dtype=torch.bfloat16)})
        self.lm_head = torch.nn.Linear(8, 100, bias=False, dtype=torch.bfloat16)
        self.lm_head.weight = self.embed_tokens.weight


EXACT = 2 * (100 * 8 + 16 + 4 * 8)


def test_weights_that_share_memory_count_once():
    assert resident_weight_bytes(Model()) == EXACT + 2 * 16 * 8


def test_rounded_weights_take_a_byte_and_a_scale_for_each_output_and_routers_and_heads_are_not_rounded():
    assert resident_weight_bytes(Model(), int8=True) == EXACT + 16 * 8 + 4 * 16


def test_tables_that_are_no_weights_are_not_rounded():
    model = Model()
    model.register_buffer("cos_sin_cache", torch.zeros(32, 8))
    assert resident_weight_bytes(model, int8=True) == resident_weight_bytes(Model(), int8=True) + 4 * 32 * 8


def test_placeholders_of_streamed_weights_take_no_memory():
    model = Model()
    model.up.weight.data = model.up.weight.data.new_zeros(1).expand(16, 8)
    assert resident_weight_bytes(model) == resident_weight_bytes(model, int8=True) == EXACT + 2


def shape_of(**config):
    return model_shape(
        SimpleNamespace(
            hf_text_config=SimpleNamespace(num_attention_heads=16, num_key_value_heads=4, **config),
            hidden_size=1024,
            vocab_size=32000,
            num_hidden_layers=12,
            head_dim=64,
            v_head_dim=64,
            dtype=torch.bfloat16,
        )
    )


def test_families_with_other_field_names_are_read_alike():
    qwen = shape_of(num_experts=64, num_experts_per_tok=8, moe_intermediate_size=384, intermediate_size=3072)
    assert (qwen.experts, qwen.top_k, qwen.expert_width, qwen.dense_width) == (64, 8, 384, 3072)
    assert qwen.attention_width == (2 * 16 + 2 * 4) * 64
    sparse = shape_of(num_experts=64, intermediate_size=3072, decoder_sparse_step=1, mlp_only_layers=[])
    assert sparse.dense_width == 0, "the width of layers that the model has none of"
    mixtral = shape_of(num_local_experts=8, num_experts_per_tok=2, intermediate_size=3072)
    assert (mixtral.experts, mixtral.top_k, mixtral.expert_width) == (8, 2, 3072)
    deepseek = shape_of(n_routed_experts=64, n_shared_experts=2, moe_intermediate_size=1408, kv_lora_rank=512)
    assert (deepseek.experts, deepseek.dense_width) == (64, 2816)
    assert deepseek.attention_width == 16 * (2 * 64 + 2 * 512)


SIZES = {"num_attention_heads": 16, "num_key_value_heads": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("config", "dense_width"),
    [
        (Qwen2MoeConfig(num_experts=8, moe_intermediate_size=32, shared_expert_intermediate_size=48, **SIZES), 48),
        (OlmoeConfig(num_experts=8, intermediate_size=32, **SIZES), 32),
        (Glm4MoeConfig(n_routed_experts=8, moe_intermediate_size=32, intermediate_size=96, **SIZES), 96),
        (MiniMaxM2Config(num_local_experts=8, intermediate_size=32, **SIZES), 32),
        (DeepseekV3Config(n_routed_experts=8, moe_intermediate_size=32, intermediate_size=96, **SIZES), 96),
    ],
    ids=lambda config: getattr(config, "model_type", ""),
)
def test_each_familys_config_gives_its_experts(config, dense_width):
    sizes = SimpleNamespace(
        hf_text_config=config,
        hidden_size=1024,
        vocab_size=32000,
        num_hidden_layers=12,
        head_dim=64,
        v_head_dim=64,
        dtype=torch.bfloat16,
    )
    shape = model_shape(sizes)
    assert (shape.experts, shape.top_k, shape.expert_width, shape.dense_width) == (8, 2, 32, dense_width)


@pytest.mark.parametrize(
    ("arguments", "latent", "row_bytes"),
    [
        ({}, 0, 16 * 8 * (64 + 1) * 4),
        ({"triton_attention_split_tile_size": 1024}, 0, 16 * 32 * (64 + 1) * 4),
        ({"enable_deterministic_inference": True}, 0, 16 * 128 * (64 + 1) * 4),
        ({}, 512, 16 * 256 * (512 + 1) * 4),
        ({"attention_backend": "fa3"}, 512, 0),
    ],
)
def test_partial_results_of_attention_follow_from_heads_and_splits(arguments, latent, row_bytes):
    decode = SimpleNamespace(backend="full", max_bs=160)
    server_args = SimpleNamespace(
        attention_backend="triton",
        cuda_graph_config=SimpleNamespace(decode=decode),
        enable_deterministic_inference=False,
        triton_attention_num_kv_splits=8,
        triton_attention_split_tile_size=None,
    )
    vars(server_args).update(arguments)
    text = SimpleNamespace(num_attention_heads=16, kv_lora_rank=latent)
    model = SimpleNamespace(hf_text_config=text, context_len=32_768, v_head_dim=64)
    use = gpu_use(server_args, model, None, decode_rows=1024, processors=132)
    assert (use.attention_row_bytes, use.decode_rows, use.graph_rows) == (row_bytes, 1024, 160)
    assert (use.shares_gpu, use.exchanges) == (False, False)
    decode.backend = "disabled"
    assert gpu_use(server_args, model, None, decode_rows=1024, processors=132).graph_rows == 0


def test_a_gpu_is_read_through_torch(monkeypatch):
    properties = SimpleNamespace(multi_processor_count=132)
    answers = {"mem_get_info": (7, 9), "memory_reserved": 3, "get_device_properties": properties}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    assert read_gpu() == GpuReading(free=7, held=3, processors=132)
