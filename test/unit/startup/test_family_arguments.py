"""The arguments that a model's family requires on a GPU, and those that it refuses before anything starts."""

from __future__ import annotations

import json

import pytest

from sgl_batch.config import BatchConfig, from_mapping
from sgl_batch.errors import ConfigError
from sgl_batch.sglang_adapter.names import CPU_ATTENTION
from sgl_batch.sglang_adapter.processes import ServerArgs, server_args_of
from sgl_batch.startup.family_arguments import family_arguments, has_sinks


@pytest.fixture
def gpt_oss(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GptOssForCausalLM"]}))
    return {"model_path": str(tmp_path)}


def test_gpt_oss_has_sinks_and_on_a_gpu_sglangs_triton_runner(gpt_oss):
    config = BatchConfig()
    assert has_sinks(gpt_oss)
    assert family_arguments(gpt_oss, config, on_cpu=True) == {}
    assert family_arguments(gpt_oss, config, on_cpu=False) == {"moe_runner_backend": "triton"}
    assert family_arguments({**gpt_oss, "moe_runner_backend": "auto"}, config, on_cpu=False) == {}
    other = {"model_path": "/nowhere"}
    assert not has_sinks(other)
    assert family_arguments(other, config, on_cpu=False) == {}


def test_a_runner_without_biases_is_refused_by_name(gpt_oss):
    config = from_mapping({"expert_runner": "deepgemm"})
    with pytest.raises(ConfigError, match=r"'deepgemm', which has no biases .* experts of GptOssForCausalLM have both"):
        family_arguments(gpt_oss, config, on_cpu=False)


def test_sglangs_checks_see_our_attention_as_one_with_sinks_where_a_model_has_them(monkeypatch):
    seen = []
    monkeypatch.setattr(ServerArgs, "_resolved_attention_backends", lambda self: (CPU_ATTENTION, "fa3"))
    monkeypatch.setattr(ServerArgs, "__post_init__", lambda self: seen.append(self._resolved_attention_backends()))
    for sinks in (True, False):
        made = server_args_of({"model_path": "a model"}, sinks=sinks)
        assert made._resolved_attention_backends() == (CPU_ATTENTION, "fa3"), "later on it has its own name"
    assert seen == [("triton", "fa3"), (CPU_ATTENTION, "fa3")]
