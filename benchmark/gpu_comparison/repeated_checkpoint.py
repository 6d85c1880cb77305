"""Owns the checkpoint for streamed weights: one layer of random weights, written again for every layer.

Streamed experts are read from safetensors files, so that dummy weights cannot be had. Drawing one layer with one
expert and writing them many times goes at the disk's speed. Tokens are routed as if all were different: that the router
and the hidden states decide.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from gpu_comparison.shapes import ModelShape
from sgl_batch.errors import ConfigError

_INIT_STD = 0.02
_INDEX = "model.safetensors.index.json"


def write_checkpoint(shape: ModelShape, directory: Path, say: Callable[[str], None]) -> Path:
    """Write the model into `directory`, unless a finished one of this shape is there already.

    Raises ConfigError where the disk has not room for it.
    """
    if (directory / _INDEX).exists() and json.loads((directory / "config.json").read_text("utf-8")) == shape.config():
        return directory
    shape.write(directory)
    free = shutil.disk_usage(directory).free
    if free < shape.weight_bytes:
        raise ConfigError(
            f"{directory} has {free / 2**30:.0f} GiB free and the checkpoint takes {shape.weight_bytes / 2**30:.0f}: "
            "lower --layers, or name another directory with --scratch"
        )
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    layer = _layer(shape, generator)
    parts = [(_ends(shape, generator), "model-ends.safetensors", "model.")]
    parts += [(layer, f"model-{number:03d}.safetensors", f"model.layers.{number}.") for number in range(shape.layers)]
    for done, (tensors, file_name, prefix) in enumerate(parts):
        named = {_name(prefix, name): tensor for name, tensor in tensors.items()}
        _write(named, directory / file_name)
        weight_map.update(dict.fromkeys(named, file_name))
        if done % 8 == 0:
            say(f"checkpoint: {done} of {len(parts)} files written")
    index = {"metadata": {"total_size": shape.weight_bytes}, "weight_map": weight_map}
    (directory / _INDEX).write_text(json.dumps(index), encoding="utf-8")
    return directory


def _name(prefix: str, name: str) -> str:
    return name if name.startswith("lm_head") else prefix + name


def _ends(shape: ModelShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return the weights before and after the layers."""
    return {
        "embed_tokens.weight": _normal(generator, shape.vocabulary, shape.hidden),
        "norm.weight": _ones(shape.hidden),
        "lm_head.weight": _normal(generator, shape.vocabulary, shape.hidden),
    }


def _layer(shape: ModelShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return one layer under the names of released Qwen3-MoE checkpoints; its experts have the same weights."""
    query, kv = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    gate = _normal(generator, shape.expert_width, shape.hidden)
    up = _normal(generator, shape.expert_width, shape.hidden)
    down = _normal(generator, shape.hidden, shape.expert_width)
    tensors = {
        "input_layernorm.weight": _ones(shape.hidden),
        "post_attention_layernorm.weight": _ones(shape.hidden),
        "self_attn.q_norm.weight": _ones(shape.head_dim),
        "self_attn.k_norm.weight": _ones(shape.head_dim),
        "self_attn.q_proj.weight": _normal(generator, query, shape.hidden),
        "self_attn.k_proj.weight": _normal(generator, kv, shape.hidden),
        "self_attn.v_proj.weight": _normal(generator, kv, shape.hidden),
        "self_attn.o_proj.weight": _normal(generator, shape.hidden, query),
        "mlp.gate.weight": _normal(generator, shape.experts, shape.hidden),
    }
    for expert in range(shape.experts):
        tensors[f"mlp.experts.{expert}.gate_proj.weight"] = gate
        tensors[f"mlp.experts.{expert}.up_proj.weight"] = up
        tensors[f"mlp.experts.{expert}.down_proj.weight"] = down
    return tensors


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.empty(*shape).normal_(0.0, _INIT_STD, generator=generator).bfloat16()


def _ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16)


def _write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file. The library's writer refuses tensors that share memory, as the experts' do here."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.view(torch.uint8).numpy().data)
