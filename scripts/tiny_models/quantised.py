"""Owns quantising a checkpoint of floats, in the forms in which quantised models are published.

It is for tests and benchmarks: numbers are rounded to the nearest, without calibration. Each form's integers are packed
as its makers describe; compressed-tensors' by that library itself.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# Matrices that quantising tools round: not embeddings, routers, nor latent attention's matrix that is applied by head.
ROUNDED = re.compile(r"(?<!kv_b)_proj\.weight$|\.w[123]\.weight$")
_BLOCK = 128
_FP8_MOST = 448.0
# Half way between the numbers 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
_MXFP4_BETWEEN = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Stored = Mapping[str, Tensor]
"""The tensors of one matrix by the end of their names."""


def fp8_blocks(weight: Tensor) -> Stored:
    """Round to fp8 with a scale for 128 x 128 numbers, as DeepSeek-V3 has it."""
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // _BLOCK) * _BLOCK, -(-columns // _BLOCK) * _BLOCK)
    padded[:rows, :columns] = weight.float()
    blocks = padded.view(padded.shape[0] // _BLOCK, _BLOCK, -1, _BLOCK)
    scales = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / _FP8_MOST
    rounded = (blocks / scales[:, None, :, None]).view_as(padded)[:rows, :columns]
    return {".weight": rounded.to(torch.float8_e4m3fn), ".weight_scale_inv": scales}


def fp8_rows(weight: Tensor) -> Stored:
    """Round to fp8 with a scale for each row, as compressed-tensors has it."""
    scales = weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / _FP8_MOST
    return {".weight": (weight.float() / scales).to(torch.float8_e4m3fn), ".weight_scale": scales.to(torch.bfloat16)}


def fp8_whole(weight: Tensor) -> Stored:
    """Round to fp8 with one scale, and one for activations beside it."""
    scale = weight.float().abs().amax() / _FP8_MOST
    rounded = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {".weight": rounded, ".weight_scale": scale, ".input_scale": torch.tensor(0.5)}


def int8_rows(weight: Tensor) -> Stored:
    """Round to int8 with a scale for each row, as compressed-tensors has it."""
    scales = (weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127).to(torch.bfloat16)
    rounded = (weight.float() / scales.float()).round().clamp(-128, 127)
    return {".weight": rounded.to(torch.int8), ".weight_scale": scales}


def _by_groups(weight: Tensor, bits: int, group: int, *, symmetric: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return unsigned integers [outputs, inputs], zero points and scales [outputs, groups]."""
    grouped = weight.float().unflatten(1, (-1, group))
    least, most = grouped.amin(dim=2).clamp(max=0), grouped.amax(dim=2).clamp(min=0)
    if symmetric:
        most = torch.maximum(-least, most)
        least = -most
    scales = ((most - least).clamp(min=1e-6) / (2**bits - 1)).to(torch.float16)
    # GPTQ's first form stores one less, in as many bits.
    zeros = (-least / scales.float()).round().clamp(1, 2**bits - 1)
    integers = (grouped / scales.float().unsqueeze(2)).round() + zeros.unsqueeze(2)
    return integers.clamp(0, 2**bits - 1).int().flatten(1), zeros.int(), scales


def _in_words(integers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack neighbours of the last dimension into words of 32 bits, the first, or that of `order`, lowest."""
    per_word = 32 // bits
    parts = integers.long().unflatten(-1, (-1, per_word))[..., list(order or range(per_word))]
    words = (parts << (torch.arange(per_word) * bits)).sum(dim=-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def gptq(
    bits: int = 4, group: int = 32, *, reorder: bool = False, symmetric: bool = False, zero_lack: int = 1
) -> Callable[[Tensor], Stored]:
    """Return what rounds as GPTQ stores matrices. `reorder`: inputs' groups are out of order (desc_act)."""

    def stored(weight: Tensor) -> Stored:
        inputs = weight.shape[1]
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(3)) if reorder else torch.arange(inputs)
        integers, zeros, scales = _by_groups(weight[:, order], bits, group, symmetric=symmetric)
        back, of_input = torch.empty_like(integers), torch.empty(inputs, dtype=torch.int32)
        back[:, order] = integers
        of_input[order] = (torch.arange(inputs) // group).int()
        return {
            ".qweight": _in_words(back, bits).t().contiguous(),
            ".qzeros": _in_words((zeros.t() - zero_lack) & (2**bits - 1), bits),
            ".scales": scales.t().contiguous(),
            ".g_idx": of_input,
        }

    return stored


def awq(weight: Tensor) -> Stored:
    """Round as AWQ stores matrices for its GEMM kernel."""
    integers, zeros, scales = _by_groups(weight, 4, 32)
    return {
        ".qweight": _in_words(integers.t(), 4, _AWQ_ORDER),
        ".qzeros": _in_words(zeros.t(), 4, _AWQ_ORDER),
        ".scales": scales.t().contiguous(),
    }


def packed(bits: int, group: int | None, *, symmetric: bool) -> Callable[[Tensor], Stored]:
    """Return what rounds and packs integers by the library compressed-tensors."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    def stored(weight: Tensor) -> Stored:
        grouped = weight.float().unflatten(1, (-1, group or weight.shape[1]))
        if symmetric:
            scales = (grouped.abs().amax(dim=2) / (2 ** (bits - 1) - 0.5)).to(torch.bfloat16)
            zeros = torch.zeros_like(scales, dtype=torch.int8)
        else:
            least, most = grouped.amin(dim=2).clamp(max=0), grouped.amax(dim=2).clamp(min=0)
            scales = ((most - least) / (2**bits - 1)).to(torch.bfloat16)
            zeros = (-least / scales.float()).round().to(torch.int32) - 2 ** (bits - 1)
            zeros = zeros.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).to(torch.int8)
        integers = (grouped / scales.float().unsqueeze(2)).round() + zeros.float().unsqueeze(2)
        integers = integers.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).to(torch.int8).flatten(1)
        of_zeros = {} if symmetric else {".weight_zero_point": pack_to_int32(zeros, bits, packed_dim=0).contiguous()}
        return {
            ".weight_packed": pack_to_int32(integers, bits),
            ".weight_scale": scales,
            ".weight_shape": torch.tensor(weight.shape),
            **of_zeros,
        }

    return stored


def mxfp4(weight: Tensor) -> Stored:
    """Round all experts' matrices [experts, inputs, outputs] as gpt-oss stores them."""
    experts, inputs, outputs = weight.shape
    stored = torch.empty(experts, outputs, inputs // 32, 16, dtype=torch.uint8)
    scales = torch.empty(experts, outputs, inputs // 32, dtype=torch.uint8)
    for expert, matrix in enumerate(weight):
        blocks = matrix.float().t().unflatten(1, (-1, 32))
        exponents = blocks.abs().amax(dim=2).clamp(min=2.0**-100).log2().floor() - 2
        scaled = blocks / torch.exp2(exponents).unsqueeze(2)
        codes = torch.bucketize(scaled.abs().contiguous(), _MXFP4_BETWEEN) + 8 * (scaled < 0)
        pairs = codes.to(torch.uint8).unflatten(2, (-1, 2))
        stored[expert] = pairs[..., 0] + 16 * pairs[..., 1]
        scales[expert] = (exponents + 127).to(torch.uint8)
    return {"_blocks": stored, "_scales": scales}


def _compressed(layout: str, weights: Mapping[str, Any], rows: Mapping[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows}
    groups = {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", "format": layout, **groups}


def _integers(bits: int, group: int | None, *, symmetric: bool) -> dict[str, Any]:
    strategy = "channel" if group is None else "group"
    return {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group, "symmetric": symmetric}


_GPTQ = {"quant_method": "gptq", "group_size": 32, "desc_act": False, "sym": False}
_FLOATS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}

_INT8_ROWS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}

# By name: the config's field, and what rounds a matrix.
FORMS: Mapping[str, tuple[Mapping[str, Any], Callable[[Tensor], Stored]]] = {
    "fp8-blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [_BLOCK, _BLOCK]},
        fp8_blocks,
    ),
    "fp8-whole": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_whole),
    "fp8-rows": (_compressed("float-quantized", _FLOATS), fp8_rows),
    "int8-rows": (_compressed("int-quantized", _integers(8, None, symmetric=True), _INT8_ROWS), int8_rows),
    "packed-4": (
        _compressed("pack-quantized", _integers(4, 32, symmetric=True)),
        packed(4, 32, symmetric=True),
    ),
    "packed-4-zeros": (
        _compressed("pack-quantized", _integers(4, 32, symmetric=False)),
        packed(4, 32, symmetric=False),
    ),
    "packed-4-rows": (
        _compressed("pack-quantized", _integers(4, None, symmetric=True)),
        packed(4, None, symmetric=True),
    ),
    "packed-8-rows": (
        _compressed("pack-quantized", _integers(8, None, symmetric=True)),
        packed(8, None, symmetric=True),
    ),
    "gptq-4": ({**_GPTQ, "bits": 4}, gptq()),
    "gptq-4-128": ({**_GPTQ, "bits": 4, "group_size": 128, "sym": True}, gptq(group=128, symmetric=True)),
    "gptq-4-reordered": ({**_GPTQ, "bits": 4, "desc_act": True}, gptq(reorder=True)),
    "gptq-8-v2": ({**_GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"}, gptq(8, zero_lack=0)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4),
}
_STACKED = re.compile(r"experts\.(gate_up|down)_proj$")


def quantise(source: Path, target: Path, form: str) -> Path:
    """Write a copy of the checkpoint `source` whose matrices are rounded in one of FORMS. Returns `target`."""
    asked, stored_of = FORMS[form]
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": asked}, indent=2))
    rounded = _STACKED if form == "mxfp4" else ROUNDED
    file_of: dict[str, str] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors: dict[str, Tensor] = {}
        for name, tensor in load_file(file).items():
            if rounded.search(name):
                begin = name.removesuffix(".weight")
                tensors |= {begin + end: part.contiguous() for end, part in stored_of(tensor).items()}
            else:
                tensors[name] = tensor
        save_file(tensors, target / file.name, {"format": "pt"})
        file_of |= dict.fromkeys(tensors, file.name)
    if len(set(file_of.values())) > 1:
        (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a copy of a checkpoint whose matrices are quantised.")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, help="a new directory")
    parser.add_argument("form", choices=FORMS)
    given = parser.parse_args()
    quantise(given.source, given.target, given.form)
