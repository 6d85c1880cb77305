"""Models by their configuration alone: their parameters are those that their authors give."""

from __future__ import annotations

import pytest

from sgl_batch.errors import ConfigError
from sgl_batch.planner.model_layers import DENSE, MOE
from sgl_batch.simulator.cluster.models import ITEM_BYTES, model_named, model_of

NAMES = (
    "deepseek-r1 deepseek-v3 kimi-k2 qwen3-30b-a3b qwen3-235b-a22b mixtral-8x7b mixtral-8x22b gpt-oss-20b gpt-oss-120b"
).split()


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_that_the_authors_publish(name):
    model = model_named(name)
    total, active = model.layers.parameters(ITEM_BYTES)
    assert total == pytest.approx(model.published[0], rel=0.003)
    # Some authors count embeddings among the parameters that a token goes through, and some do not.
    assert active == pytest.approx(model.published[1], rel=0.09)
    assert model.source.startswith("config.json of ")


def test_bytes_are_those_of_each_part_s_number_type():
    deepseek, oss = model_named("deepseek-r1"), model_named("gpt-oss-120b")
    assert deepseek.expert_bytes == 58 * 256 * 3 * 7168 * 2048
    assert deepseek.expert_bytes + deepseek.other_bytes == pytest.approx(673e9, rel=0.001)
    assert oss.expert_bytes == 36 * 128 * 3 * 2880 * 2880 * 4.25 / 8
    assert oss.layers.attention_bytes == 2 * 2880 * 64 * (64 + 8 + 8 + 64)


def test_layers_and_kv_are_counted_from_the_configuration():
    assert model_named("kimi-k2").layers.layers == {DENSE: 1, MOE: 60}
    assert model_named("deepseek-r1").kv_token_bytes == 61 * (512 + 64) * 2
    assert model_named("mixtral-8x7b").kv_token_bytes == 32 * 2 * 8 * 128 * 2
    oss = model_named("gpt-oss-20b").layers
    assert (oss.window, oss.window_layers) == (128, 12)
    assert model_named("qwen3-30b-a3b").layers.window_layers == 0


def test_unknown_models_and_number_types_are_refused():
    with pytest.raises(ConfigError, match=r"deepseek-r1.*qwen3-30b-a3b"):
        model_named("gpt-5")
    with pytest.raises(ConfigError, match="awq"):
        model_of({"quantization_config": {"quant_method": "awq"}}, name="x")
