"""The families that the coroutine forward knows, as checkpoints of random float32 weights, and proof by Hugging Face.

A family is one entry of `FAMILIES`. Its weights are drawn anew where they are needed, the same each time.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
SHARED = {
    "vocab_size": 3072,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Two logits nearer than this may change places by rounding in float32: another `seed` has none so near.
LEAST_GAP = 1e-4
KIMI_POSITIONS = {
    "type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
TRANSFORMERS, HUB = "transformers", "hub"
FORMS = (TRANSFORMERS, HUB)


@dataclass(frozen=True, kw_only=True)
class RandomFamily:
    """A small model of a family.

    `settings`: entries of its config beside SHARED, by transformers' names; `hub`: entries in which a published
    config.json differs from what transformers writes, None for those that it lacks (positions and the number type are
    put into the published form for all). `read_otherwise`: those that transformers reads otherwise from the published
    form. `further_layer`: published with a layer behind the last, which predicts a further token. `scales`: factors on
    the standard deviation of the weights whose names have the given ending. `experts`: whether layers have experts,
    which then lie on several ranks and, but for those of which a layer's are `one_tensor`, are streamed.
    """

    name: str
    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    hub: Mapping[str, Any] = field(default_factory=dict)
    read_otherwise: Sequence[str] = ()
    further_layer: bool = False
    scales: Mapping[str, float] = field(default_factory=dict)
    experts: bool = False
    one_tensor: bool = False
    seed: int = 0


FAMILIES = (
    RandomFamily(
        name="qwen3",
        model_type="qwen3",
        settings={"head_dim": 32, "intermediate_size": 160, "rope_theta": 1e6},
    ),
    RandomFamily(
        name="qwen3-tied",
        model_type="qwen3",
        settings={"head_dim": 32, "intermediate_size": 160, "tie_word_embeddings": True},
    ),
    RandomFamily(name="qwen2", model_type="qwen2", settings={"intermediate_size": 160}),
    RandomFamily(
        name="llama3",
        model_type="llama",
        settings={
            "intermediate_size": 160,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    RandomFamily(
        name="mistral",
        model_type="mistral",
        settings={"head_dim": 32, "intermediate_size": 160, "sliding_window": None},
    ),
    RandomFamily(
        name="mixtral",
        model_type="mixtral",
        settings={"intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2},
        experts=True,
    ),
    RandomFamily(
        name="qwen2-moe",
        model_type="qwen2_moe",
        settings={
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "num_experts": 8,
            "num_experts_per_tok": 3,
        },
        experts=True,
    ),
    RandomFamily(
        name="qwen3-moe-dense-layers",
        model_type="qwen3_moe",
        settings={
            "num_hidden_layers": 6,
            "head_dim": 24,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
        },
        scales={"down_proj.weight": 2.0},
        experts=True,
    ),
    RandomFamily(
        name="olmoe",
        model_type="olmoe",
        settings={
            "intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-2,
        },
        experts=True,
    ),
    RandomFamily(
        name="glm4-moe",
        model_type="glm4_moe",
        settings={
            "num_hidden_layers": 3,
            "head_dim": 32,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_nextn_predict_layers": 1,
        },
        hub={"partial_rotary_factor": 0.5},
        further_layer=True,
        experts=True,
    ),
    RandomFamily(
        name="kimi-k2",
        model_type="deepseek_v3",
        settings={
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "n_routed_experts": 24,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.827,
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "max_position_embeddings": 131072,
            "rope_theta": 50000.0,
            "rope_scaling": KIMI_POSITIONS,
        },
        hub={
            "model_type": "kimi_k2",
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 0,
            "rope_scaling": KIMI_POSITIONS,
        },
        read_otherwise=("model_type",),
        experts=True,
    ),
    RandomFamily(
        name="minimax-m2",
        model_type="minimax_m2",
        settings={
            "head_dim": 32,
            "intermediate_size": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        },
        hub={
            "rotary_dim": 16,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "use_mtp": True,
            "num_mtp_modules": 3,
            "mtp_transformer_layers": 1,
            "attn_type_list": [1, 1],
            "shared_intermediate_size": 0,
            "mlp_intermediate_size": 8192,
        },
        read_otherwise=("rope_parameters",),
        experts=True,
    ),
    RandomFamily(
        name="gpt-oss",
        model_type="gpt_oss",
        settings={
            "head_dim": 32,
            "intermediate_size": 96,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "swiglu_limit": 7.0,  # of which transformers knows no other
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
        scales={"self_attn.sinks": 5.0, "_bias": 3.0, "gate_up_proj": 10.0, "down_proj": 0.1},
        experts=True,
        one_tensor=True,
    ),
)


def make_checkpoint(family: RandomFamily, form: str, directory: Path, tokenizer_from: Path) -> str:
    """Write the family's checkpoint with its config in one of FORMS into `directory`; returns the path."""
    path = directory / f"{family.name}-{form}"
    torch.manual_seed(family.seed)
    config = AutoConfig.for_model(family.model_type, **{**SHARED, **family.settings})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _draw(model, family.scales)
    model.save_pretrained(path)
    if form == HUB:
        written = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(published(written, family.hub), indent=2))
        if family.further_layer:
            _add_layer(path / "model.safetensors", config.num_hidden_layers)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(tokenizer_from / name, path / name)
    return str(path)


def _add_layer(file: Path, number: int) -> None:
    """Put a layer behind the last, with the tensors beside it that predict a further token."""
    tensors = load_file(file)
    last, further = f"model.layers.{number - 1}.", f"model.layers.{number}."
    copied = {name.replace(last, further): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)}
    norm = tensors["model.norm.weight"]
    names = ("enorm", "hnorm", "shared_head.norm")
    own = {f"{further}{name}.weight": norm.clone() for name in names}
    own[f"{further}eh_proj.weight"] = torch.ones(len(norm), 2 * len(norm))
    save_file({**tensors, **copied, **own}, file, metadata={"format": "pt"})


def _draw(model: torch.nn.Module, scales: Mapping[str, float]) -> None:
    """Draw all weights, of which none shall be without effect: norms are not all ones, biases not all zeros.

    A matrix keeps the size of what it multiplies, so that each token depends on all before it.
    """
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    saved = model.state_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name not in saved:
                continue
            scale = next((scale for ending, scale in scales.items() if name.endswith(ending)), 1.0)
            if tensor.dim() >= 2:
                tensor.normal_(0.0, scale / math.sqrt(tensor.shape[-1]))
            elif name.endswith("norm.weight"):
                tensor.normal_(1.0, 0.2 * scale)
            else:
                tensor.normal_(0.0, 0.2 * scale)


def published(config: Mapping[str, Any], hub: Mapping[str, Any]) -> dict[str, Any]:
    """A config that transformers has written, in the form of those that are published with models."""
    positions = dict(config.get("rope_parameters") or {})
    theta = positions.pop("rope_theta", None)
    kind = positions.pop("rope_type", "default")
    rest = {name: value for name, value in config.items() if name not in ("rope_parameters", "dtype")}
    old = {"rope_theta": theta} if theta is not None else {}
    old["rope_scaling"] = None if kind == "default" else {"rope_type": kind, **positions}
    whole = {**rest, **old, "torch_dtype": config["dtype"], **hub}
    return {name: value for name, value in whole.items() if value is not None or name not in hub}


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Prompts of random tokens, some of which begin alike, with how many greedy tokens each is to get."""

    input_ids: Sequence[list[int]]
    lengths: Sequence[int]

    @property
    def sampling_params(self) -> list[dict[str, Any]]:
        return [{"temperature": 0, "max_new_tokens": length, "ignore_eos": True} for length in self.lengths]


def make_requests(page: int) -> Requests:
    """Prompts from one token to several pages; every other begins with the same three pages."""
    draw = random.Random(0)
    common = [draw.randrange(5, 3000) for _ in range(3 * page)]
    own = (1, 2, page, page + 1, 3 * page - 1, 1, 5 * page, 9 * page + 3, 4, 2 * page)
    prompts = [
        [*(common if index % 2 else []), *(draw.randrange(5, 3000) for _ in range(length))]
        for index, length in enumerate(own)
    ]
    lengths = (24, 20, 1, 17, 9, 24, 2, 16, 12, 20)
    return Requests(input_ids=prompts, lengths=lengths)


def check_greedy(path: str, requests: Requests, outputs: Sequence[Sequence[int]]) -> None:
    """Prove that the outputs are what Hugging Face's model gives greedily.

    Each of their tokens has the largest logit behind those before it; so the model would have chosen the same.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    distinct = set()
    for prompt, length, output in zip(requests.input_ids, requests.lengths, outputs, strict=True):
        assert len(output) == length
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]
        best = logits.topk(2)
        gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
        expected = best.indices[:, 0].tolist()
        wrong = next((index for index, token in enumerate(output) if token != expected[index]), None)
        assert wrong is None, (
            f"prompt of {len(prompt)} tokens: output {wrong} is {output[wrong]}, not {expected[wrong]}, "
            f"of which the logit is {gaps[wrong]:.1e} larger than the next"
        )
        assert min(gaps) > LEAST_GAP, f"two logits lie {min(gaps):.1e} apart: take another seed"
        distinct.update(output)
    assert len(distinct) > sum(requests.lengths) / 2, "a model that repeats itself shows little: take other scales"
