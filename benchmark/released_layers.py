"""Owns writing checkpoints with layers of the sizes of released models': fewer layers, random weights.

Speed depends on the sizes of layers and on how tokens spread over experts, which by random routers is about even. The
vocabulary is small, so that few layers do not have an output product as large as all layers of the whole model have.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_batch.errors import ConfigError
from sgl_batch.sglang_adapter import bootstrap

_SHARED: dict[str, Any] = {
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """The sizes of a released model's layers, by transformers' names, and how many layers to write."""

    model_type: str
    layers: int
    settings: Mapping[str, Any]


RELEASED = {
    "qwen3-30b-a3b": Released(
        model_type="qwen3_moe",
        layers=3,
        settings={
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
        },
    ),
    "olmoe-1b-7b": Released(
        model_type="olmoe",
        layers=4,
        settings={
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
    ),
    "mixtral-8x7b": Released(
        model_type="mixtral",
        layers=1,
        settings={
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek-v2-lite": Released(
        model_type="deepseek_v2",
        layers=4,  # the first is dense
        settings={
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "n_shared_experts": 2,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "n_group": None,
            "topk_group": None,
            "norm_topk_prob": False,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
    ),
    "gpt-oss-20b": Released(
        model_type="gpt_oss",
        layers=2,  # one with a window, one without
        settings={
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
        },
    ),
}


def build(name: str, layers: int, **changed: Any) -> Any:
    """Return the model of RELEASED[name] with so many layers, of weights as its family draws them; see transformers."""
    bootstrap.prepare()  # transformers imports torchvision, whose wheel does not load with a CPU torch
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    released = RELEASED[name]
    settings = {**_SHARED, **released.settings, **changed, "num_hidden_layers": layers, "dtype": "bfloat16"}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(released.model_type, **settings), dtype=torch.bfloat16)


def make_released_layers(
    name: str, directory: Path, tokenizer_from: Path, layers: int, *, vocabulary: int | None = None
) -> int:
    """Write a checkpoint with the layers of RELEASED[name] in bfloat16 and return its number of parameters.

    The same weights each time. `vocabulary`: as many tokens as that, of which the tokenizer knows the first (as many
    as the tokenizer). Raises ConfigError if `directory` is in use.
    """
    known: int = _SHARED["vocab_size"]
    if vocabulary is not None and vocabulary < known:
        raise ConfigError(f"--make-model-vocabulary is {vocabulary}; the tokenizer alone has {known} tokens")
    if layers < 1:
        raise ConfigError(f"--make-model-layers is {layers}; a model has at least 1 layer")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} already holds files; name a new directory, or delete it first")
    model = build(name, layers, vocab_size=vocabulary or known)
    model.save_pretrained(directory)
    for file in _TOKENIZER_FILES:
        shutil.copyfile(tokenizer_from / file, directory / file)
    return sum(parameter.numel() for parameter in model.parameters())
