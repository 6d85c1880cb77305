"""Owns drawing and writing a family's checkpoint of random weights; random_families has the families.

Its config is in the form that transformers writes, or in that of published models.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from .random_families import SHARED, RandomFamily

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
TRANSFORMERS, HUB = "transformers", "hub"
FORMS = (TRANSFORMERS, HUB)


def make_checkpoint(
    family: RandomFamily, form: str, directory: Path, tokenizer_from: Path, *, dtype: torch.dtype = torch.float32
) -> str:
    """Write the family's checkpoint with its config in one of FORMS into `directory`; returns the path.

    Its weights are the same each time, and the same in both forms.
    """
    path = directory / f"{family.name}-{form}"
    torch.manual_seed(family.seed)
    # A copy, because transformers adds fields to it.
    config = AutoConfig.for_model(family.model_type, **deepcopy({**SHARED, **family.settings}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _draw(model, family.scales)
    model.to(dtype).save_pretrained(path)
    if form == HUB:
        written = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(published(written, family.hub), indent=2))
        if family.further_layer:
            _add_layer(path / "model.safetensors", config.num_hidden_layers)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(tokenizer_from / name, path / name)
    return str(path)


def _add_layer(file: Path, number: int) -> None:
    """Add a layer after the last one, with the tensors that predict one more token."""
    tensors = load_file(file)
    last, further = f"model.layers.{number - 1}.", f"model.layers.{number}."
    copied = {name.replace(last, further): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)}
    norm = tensors["model.norm.weight"]
    names = ("enorm", "hnorm", "shared_head.norm")
    own = {f"{further}{name}.weight": norm.clone() for name in names}
    own[f"{further}eh_proj.weight"] = torch.ones(len(norm), 2 * len(norm), dtype=norm.dtype)
    save_file({**tensors, **copied, **own}, file, metadata={"format": "pt"})


def _draw(model: torch.nn.Module, scales: Mapping[str, float]) -> None:
    """Draw all weights so that each has an effect: norms are not all ones, biases not all zeros.

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
    """Convert a config that transformers wrote to the form of configs that are published with models."""
    positions = dict(config.get("rope_parameters") or {})
    theta = positions.pop("rope_theta", None)
    kind = positions.pop("rope_type", "default")
    rest = {name: value for name, value in config.items() if name not in ("rope_parameters", "dtype")}
    old = {"rope_theta": theta} if theta is not None else {}
    old["rope_scaling"] = None if kind == "default" else {"rope_type": kind, **positions}
    whole = {**rest, **old, "torch_dtype": config["dtype"], **hub}
    return {name: value for name, value in whole.items() if value is not None or name not in hub}
