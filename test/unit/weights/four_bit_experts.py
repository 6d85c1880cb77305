"""Small checkpoints of experts, rounded in one of the published forms, mostly to integers of 4 bits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from streamed_slots import MODULE

from sgl_batch.checkpoint.model_directory import form_of_weights
from sgl_batch.core.quantised_form import QuantisedForm
from sgl_batch.weights.expert_checkpoint import ExpertLocations, find_experts

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))
from tiny_models.quantised import quantise

EXPERTS, HIDDEN, INTER = 3, 256, 128
Tensors = dict[str, torch.Tensor]


def checkpoint(
    folder: Path,
    form: str,
    *,
    hidden: int = HIDDEN,
    inter: int = INTER,
    change: Callable[[Tensors], None] | None = None,
) -> Path:
    """Write experts rounded in one of the forms, and return their directory."""
    draw, source, tensors = torch.Generator().manual_seed(hidden), folder / "floats", Tensors()
    source.mkdir()
    for expert in range(EXPERTS):
        for name, shape in {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}.items():
            weight = torch.randn(shape, generator=draw, dtype=torch.float32) / 8
            tensors[f"{MODULE}.{expert}.{name}_proj.weight"] = weight.bfloat16()
    (source / "config.json").write_text("{}")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    path = quantise(source, folder / "quantised", form)
    if change is not None:
        changed = load_file(path / "model.safetensors")
        change(changed)
        save_file(changed, path / "model.safetensors", {"format": "pt"})
    return path


def form_of(path: Path) -> QuantisedForm:
    form = form_of_weights(str(path))
    assert form is not None
    return form


def found(path: Path) -> ExpertLocations:
    return find_experts([str(path / "model.safetensors")], [MODULE], range(EXPERTS), form=form_of(path))


def set_zero_point(tensors: Tensors) -> None:
    tensors[f"{MODULE}.1.up_proj.qzeros"][0, 0] = -1  # one more than is stored is 16


def reorder(tensors: Tensors) -> None:
    tensors[f"{MODULE}.2.gate_proj.g_idx"] = tensors[f"{MODULE}.2.gate_proj.g_idx"].flip(0)
