"""A window that SGLang's model ignores is refused if a sequence may become longer than it."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config, Qwen3Config

from sgl_batch.errors import ConfigError
from sgl_batch.model_executor.attention_window import check_window


def test_a_window_is_refused_with_the_context_length_that_needs_none():
    for name, config in (("Mistral", MistralConfig), ("Mixtral", MixtralConfig)):
        windowed = config(sliding_window=4096)
        check_window([f"{name}ForCausalLM"], windowed, 4096)
        with pytest.raises(ConfigError, match=r"the last 4096 tokens .* of 4097 tokens.* --context-length 4096"):
            check_window([f"{name}ForCausalLM"], windowed, 4097)


@pytest.mark.parametrize("config", [Qwen2Config, Qwen3Config])
def test_qwens_window_counts_where_some_layer_uses_it(config):
    name = config.__name__.replace("Config", "ForCausalLM")
    check_window([name], config(use_sliding_window=False, sliding_window=64), 1000)
    check_window([name], config(use_sliding_window=True, sliding_window=64, max_window_layers=99), 1000)
    with pytest.raises(ConfigError, match="give --context-length 64"):
        check_window([name], config(use_sliding_window=True, sliding_window=64, max_window_layers=1), 1000)


def test_models_without_a_window_and_of_other_families_are_not_refused():
    check_window(["LlamaForCausalLM"], LlamaConfig(), 1 << 20)
    check_window(["MistralForCausalLM"], MistralConfig(sliding_window=None), 1 << 20)
    check_window(["OfNoFamily"], MistralConfig(sliding_window=64), 1 << 20)
