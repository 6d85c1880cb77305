"""A model of the hub is checked by its config, also where the check itself has fetched it."""

from __future__ import annotations

import pytest

from sgl_batch.checkpoint.model_directory import ModelSource
from sgl_batch.errors import ConfigError
from sgl_batch.startup import model_checks


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"architectures": ["OfNoFamilyForCausalLM"]}, "SGLang has no model of its own for it"),
        ({"architectures": ["Qwen3NextForCausalLM"], "layer_types": ["linear_attention"]}, "carries a state"),
    ],
)
def test_a_config_that_the_check_has_fetched_is_checked_too(monkeypatch, config, why):
    here: list[dict] = []
    monkeypatch.setattr(model_checks, "model_config", lambda *_: here[0] if here else None)
    monkeypatch.setattr(model_checks, "check_model", lambda *_: here.append(config))
    with pytest.raises(ConfigError, match=why):
        model_checks.check_any_device(ModelSource(model="org/name"))
