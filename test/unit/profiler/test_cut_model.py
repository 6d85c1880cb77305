"""How a model is cut for its profile, and which of its layers have experts."""

from __future__ import annotations

import pytest

from sgl_batch.errors import ConfigError
from sgl_batch.planner.model_layers import DENSE, MOE, layer_kinds, model_layers
from sgl_batch.profiler.cut_model import cut

QWEN = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 384,
    "intermediate_size": 3072,
}


def test_layers_have_experts_as_the_config_says():
    assert layer_kinds(QWEN) == [MOE] * 12
    assert layer_kinds({**QWEN, "mlp_only_layers": [1]})[:3] == [MOE, DENSE, MOE]
    assert layer_kinds({**QWEN, "decoder_sparse_step": 2})[:4] == [DENSE, MOE, DENSE, MOE]
    assert layer_kinds({**QWEN, "first_k_dense_replace": 3})[:4] == [DENSE, DENSE, DENSE, MOE]
    assert layer_kinds({**QWEN, "num_experts": 0}) == [DENSE] * 12


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_a_config_without_a_field_is_refused_by_the_fields_name(field):
    config = {name: value for name, value in QWEN.items() if name != field}
    with pytest.raises(ConfigError, match=field):
        layer_kinds(config)


def test_the_numbers_of_a_model_follow_from_its_config():
    found = model_layers(QWEN, item_bytes=2, weight_bytes=1)
    assert (found.experts, found.top_k, found.num_layers) == (64, 8, 12)
    assert found.expert_bytes_each == 3 * 1024 * 384
    assert found.kv_layer_bytes == 2 * 4 * 64 * 2


def test_few_rows_reach_few_experts():
    found = model_layers(QWEN, item_bytes=2, weight_bytes=2)
    assert found.experts_reached(1) == pytest.approx(8)
    assert 63 < found.experts_reached(64) < 64


def test_a_model_of_one_kind_keeps_as_many_layers_as_load_soon():
    assert cut([MOE] * 12, 2e9).layers == {MOE: [0, 1]}
    assert cut([MOE] * 12, 300e6).layers == {MOE: [0, 1, 2]}
    assert cut([DENSE] * 28, 30e6).overrides == {"num_hidden_layers": 6}
    assert cut([DENSE] * 3, 1.0).layers == {DENSE: [0, 1, 2]}


def test_a_model_of_two_kinds_keeps_its_beginning():
    found = cut([DENSE, MOE, MOE, MOE], 200e6)
    assert found.overrides == {"num_hidden_layers": 3}
    assert found.layers == {DENSE: [0], MOE: [1, 2]}
