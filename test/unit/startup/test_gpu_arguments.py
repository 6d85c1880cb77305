"""Open arguments on a GPU are chosen by the machine's facts, and reported where they differ from SGLang's choice."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from sgl_batch.config import ForwardConfig
from sgl_batch.errors import ConfigError
from sgl_batch.startup.gpu_arguments import MachineFacts, ModelFacts, chosen_arguments, machine_facts, model_facts

WHOLE = MachineFacts(capability=(9, 0), flash_attention_3=True, flashinfer=True, xgrammar=True)
AMPERE = replace(WHOLE, capability=(8, 0))
CPU = replace(WHOLE, capability=None, flash_attention_3=False, flashinfer=False)
SPLIT = ModelFacts(is_split=True, is_latent=False)
SIZES = {"cuda_graph_max_bs_decode": 256}
TRITON = {"attention_backend": "triton"}


@pytest.mark.parametrize(
    ("facts", "given", "arguments", "sentences"),
    [
        (WHOLE, {}, {}, []),
        (
            replace(WHOLE, flash_attention_3=False),
            {},
            TRITON,
            [r"attention backend: triton, because .* lacks flash_ops.* pip install .*sglang-kernel==.* brings it"],
        ),
        (replace(WHOLE, flash_attention_3=False), TRITON, {}, []),
        (AMPERE, {}, TRITON, [r"triton, because flashinfer, .* several sub-batches .* --attention-backend flashinfer"]),
        (AMPERE, {"attention_backend": "flashinfer"}, {}, []),
        (AMPERE, {"decode_attention_backend": "flashinfer"}, {}, []),
        (replace(WHOLE, capability=(12, 0)), {}, TRITON, ["triton, because flashinfer"]),
        (replace(WHOLE, capability=(10, 0)), {}, {}, []),
        (
            replace(AMPERE, flashinfer=False),
            {},
            {**TRITON, "sampling_backend": "pytorch"},
            [r"^sampling backend: pytorch, because flashinfer is not installed; pip install flashinfer_python"],
        ),
        (replace(WHOLE, flashinfer=False), {"sampling_backend": "pytorch"}, {}, []),
        (
            replace(WHOLE, xgrammar=False),
            {},
            {"grammar_backend": "none"},
            [r"^grammar backend: none, because xgrammar is not .* are refused; pip install xgrammar==.* brings it$"],
        ),
        (replace(WHOLE, xgrammar=False), {"grammar_backend": "llguidance"}, {}, []),
    ],
)
def test_open_arguments_are_chosen_by_the_machines_facts(facts, given, arguments, sentences):
    choice = chosen_arguments(given, ForwardConfig(), facts, SPLIT)
    assert choice.arguments == {**SIZES, **arguments}
    assert len(choice.sentences) == len(sentences)
    for sentence, words in zip(choice.sentences, sentences, strict=True):
        assert re.search(words, sentence)


@pytest.mark.parametrize(
    ("lacking", "given", "message"),
    [
        (
            "flash_attention_3",
            {"attention_backend": "fa3"},
            "lacks flash_ops, which implements it: choose 'triton', or",
        ),
        ("flashinfer", {"attention_backend": "flashinfer"}, "not installed: choose 'triton', or install it .pip"),
        ("flashinfer", {"sampling_backend": "flashinfer"}, "sampling_backend is 'flashinfer', which is not installed"),
        ("xgrammar", {"grammar_backend": "xgrammar"}, "grammar_backend is 'xgrammar', which is not installed"),
    ],
)
def test_a_named_package_that_is_missing_is_refused_with_its_install_command(lacking, given, message):
    with pytest.raises(ConfigError, match=message):
        chosen_arguments(given, ForwardConfig(), replace(WHOLE, **{lacking: False}), SPLIT)


def test_a_model_whose_groups_are_not_split_keeps_sglangs_attention():
    assert chosen_arguments({}, ForwardConfig(), AMPERE, replace(SPLIT, is_split=False)).arguments == SIZES


def test_a_cpu_reports_missing_grammars_only():
    assert chosen_arguments({}, ForwardConfig(), CPU, SPLIT).arguments == {}
    ours, lacking = {"grammar_backend": "sgl_batch_xgrammar"}, replace(CPU, xgrammar=False)
    choice = chosen_arguments(ours, ForwardConfig(), lacking, SPLIT)
    assert choice.arguments == {"grammar_backend": "none"}


@pytest.mark.parametrize(
    ("given", "sizes", "largest"),
    [
        ({}, {"b_attn_decode": 1024, "b_moe_decode": 1024}, 1024),
        ({}, {"b_moe_decode": 1024}, 1024),
        ({}, {"b_moe_decode": 1024, "decode_forward": "default"}, 1024),
        ({}, {"b_attn_decode": 256, "b_moe_decode": 1024}, 1024),
        ({}, {"b_attn_decode": 256, "b_moe_decode": 1024, "decode_forward": "sglang"}, 1024),
        ({}, {"b_attn_decode": 256, "b_moe_decode": 1024, "decode_forward": "default"}, 256),
        ({}, {"b_attn_decode": 256, "b_moe_decode": 32}, 32),
        ({"cuda_graph_max_bs_decode": 8}, {}, None),
        ({"cuda_graph_bs_decode": [1, 8]}, {}, None),
        ({"cuda_graph_config": {"decode": {"max_bs": 8}}}, {}, None),
        ({"disable_cuda_graph": True}, {}, None),
        ({"cuda_graph_backend_decode": "disabled"}, {}, None),
    ],
)
def test_decode_graphs_reach_the_largest_group_that_they_compute(given, sizes, largest):
    arguments = chosen_arguments(given, ForwardConfig(**sizes), WHOLE, SPLIT).arguments
    assert arguments.get("cuda_graph_max_bs_decode") == largest


def test_latent_attention_has_graphs_of_moderate_size():
    latent = replace(SPLIT, is_latent=True)
    for b_attn, b_moe, largest in ((128, 1024, 128), (0, 1024, 256), (0, 32, 32)):
        sizes = ForwardConfig(b_attn_decode=b_attn, b_moe_decode=b_moe)
        assert chosen_arguments({}, sizes, WHOLE, latent).arguments == {"cuda_graph_max_bs_decode": largest}


@pytest.mark.parametrize(
    ("config", "is_split", "is_latent"),
    [
        (None, True, False),
        ({"architectures": ["DeepseekV2ForCausalLM"], "kv_lora_rank": 512}, True, True),
        ({"architectures": ["DeepseekV2ForCausalLM"], "text_config": {"kv_lora_rank": 512}}, True, True),
        ({"architectures": ["Phi3ForCausalLM"], "kv_lora_rank": None}, False, False),
    ],
)
def test_a_models_config_says_whether_it_is_split_and_latent(config, is_split, is_latent, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_facts(str(tmp_path), None) == ModelFacts(is_split=is_split, is_latent=is_latent)


def test_gpu_packages_are_looked_up_without_a_gpu():
    facts = machine_facts(on_cpu=True)
    assert facts.capability is None
    assert facts.xgrammar
    assert not facts.flash_attention_3
