"""Quantised matrices are taken back to the floats that the makers of each form compute from them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import sgl_batch_kernel
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sgl_batch.checkpoint.files import read_header
from sgl_batch.checkpoint.model_directory import form_of_weights
from sgl_batch.checkpoint.quantised import (
    FP8_BITS,
    INT8_BITS,
    INTEGER_BITS,
    GroupedBits,
    QuantisedMatrix,
    find_quantised,
)
from sgl_batch.core.quantised_form import quantised_form
from sgl_batch.errors import ConfigError
from sgl_batch.layers.small_weights import GROUPED_FORMS
from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.weights.dequantised import Dequantised, draw_numbers
from sgl_batch.weights.load_share import LoadShare

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))
from tiny_models.quantised import quantise

Parts = Mapping[str, Tensor]


def of_blocks(parts: Parts) -> Tensor:
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    exact: Tensor = block_quant_dequant(parts[".weight"], parts[".weight_scale_inv"], [128, 128], torch.float32)
    return exact


def of_rows(parts: Parts) -> Tensor:
    return parts[".weight"].float() * parts[".weight_scale"].float()


def of_packed(parts: Parts) -> Tensor:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    shape, scales = torch.Size(parts[".weight_shape"].tolist()), parts[".weight_scale"].float()
    bits = parts[".weight_packed"].shape[1] * 32 // shape[1]
    integers = unpack_from_int32(parts[".weight_packed"], bits, shape).float()
    zeros = torch.zeros_like(scales)
    if ".weight_zero_point" in parts:
        zeros = unpack_from_int32(parts[".weight_zero_point"], bits, scales.shape, packed_dim=0).float()
    group = shape[1] // scales.shape[1]
    return (integers - zeros.repeat_interleave(group, dim=1)) * scales.repeat_interleave(group, dim=1)


def of_gptq(bits: int, lack: int) -> Callable[[Parts], Tensor]:
    """By number, as the form is described: the i-th integer of a word lies in its i-th bits from below."""

    def exact(parts: Parts) -> Tensor:
        words, zeros = (parts[end].long() & 0xFFFFFFFF for end in (".qweight", ".qzeros"))
        order, scales = parts[".g_idx"].long(), parts[".scales"].float()
        per_word, most = 32 // bits, 2**bits - 1
        inputs, outputs = words.shape[0] * per_word, words.shape[1]
        made = torch.empty(outputs, inputs)
        for i in range(inputs):
            integers = (words[i // per_word] >> (bits * (i % per_word))) & most
            row = zeros[order[i]]
            lacks = torch.stack([(row[o // per_word] >> (bits * (o % per_word))) & most for o in range(outputs)]) + lack
            made[:, i] = (integers - lacks).float() * scales[order[i]]
        return made

    return exact


def of_awq(parts: Parts) -> Tensor:
    from sglang.kernels.ops.quantization.awq_triton import awq_dequantize_decomposition

    exact: Tensor = awq_dequantize_decomposition(parts[".qweight"], parts[".scales"].float(), parts[".qzeros"])
    return exact.t()


def of_mxfp4(parts: Parts) -> Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    exact: Tensor = convert_moe_packed_tensors(parts["_blocks"], parts["_scales"], dtype=torch.float32)
    return exact


# gptq-4-128 differs from gptq-4 in the size of its groups, for which the matrices here are too small.
EXACT: Mapping[str, Callable[[Parts], Tensor]] = {
    "fp8-blocks": of_blocks,
    "fp8-whole": of_rows,
    "fp8-rows": of_rows,
    "int8-rows": of_rows,
    "packed-4": of_packed,
    "packed-4-zeros": of_packed,
    "packed-4-rows": of_packed,
    "packed-8-rows": of_packed,
    "gptq-4": of_gptq(4, 1),
    "gptq-4-reordered": of_gptq(4, 1),
    "gptq-8-v2": of_gptq(8, 0),
    "awq": of_awq,
    "mxfp4": of_mxfp4,
}


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    bootstrap.prepare()


@pytest.fixture
def floats(tmp_path: Path, repo_root: Path) -> Path:
    """A checkpoint of three matrices, of which one has no whole blocks, one tensor that stays, and stacked experts."""
    source = tmp_path / "floats"
    source.mkdir()
    shutil.copyfile(repo_root / "test/models/tiny-qwen3-moe/config.json", source / "config.json")
    draw = torch.Generator().manual_seed(5)
    shapes = {
        "model.layers.0.self_attn.q_proj.weight": (160, 288),
        "model.layers.0.mlp.experts.3.down_proj.weight": (128, 96),
        "model.layers.0.mlp.experts.3.up_proj.weight": (96, 128),
        "model.layers.0.mlp.gate.weight": (16, 128),
        "model.layers.0.mlp.experts.gate_up_proj": (3, 64, 96),
    }
    tensors = {name: torch.randn(shape, generator=draw) / 8 for name, shape in shapes.items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    return source


def loaded(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    form = form_of_weights(str(path))
    assert form is not None
    file = path / "model.safetensors"
    # Each tensor's memory is used again, unless it is kept.
    return {name: one.clone() for name, one in Dequantised(form, dtype)([str(file)], load_file(file).items())}


def matrices(path: Path) -> dict[str, QuantisedMatrix]:
    form = form_of_weights(str(path))
    assert form is not None
    return dict(find_quantised(read_header(path / "model.safetensors"), form).matrices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", EXACT)
def test_matrices_are_those_that_the_forms_makers_compute(
    form: str, dtype: torch.dtype, floats: Path, tmp_path: Path
) -> None:
    path = quantise(floats, tmp_path / form, form)
    stored, plain, made = load_file(path / "model.safetensors"), load_file(floats / "model.safetensors"), {}
    for name, matrix in matrices(path).items():
        exact = EXACT[form]({end: stored[matrix.begin + end] for end in matrix.parts})
        made[name] = exact.to(dtype)
    assert len(made) == (1 if form == "mxfp4" else 3)
    got = loaded(path, dtype)
    assert got.keys() == plain.keys()
    for name, tensor in got.items():
        if name not in made:
            assert torch.equal(tensor, plain[name]), "what is not quantised stays"
            continue
        assert tensor.dtype == dtype
        assert tensor.shape == plain[name].shape
        assert torch.equal(tensor, made[name])
        assert (tensor.float() - plain[name]).norm() < 0.2 * plain[name].norm(), "only rounding lies between"


def test_all_16_numbers_of_mxfp4_and_its_smallest_and_largest_scales() -> None:
    from sgl_batch.weights.dequantised import mxfp4_floats

    codes = torch.arange(16, dtype=torch.uint8)
    blocks = (codes + 16 * codes.flip(0)).view(1, 1, 1, 16).repeat(1, 3, 1, 1)
    scales = torch.tensor([[[2], [127], [251]]], dtype=torch.uint8)
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    signed = torch.tensor([*numbers, *(-one for one in numbers)], dtype=torch.float64)
    expected = torch.stack((signed, signed.flip(0)), dim=1).flatten()
    for dtype in (torch.float32, torch.bfloat16):
        made = torch.empty(1, 3, 32, dtype=dtype)
        mxfp4_floats(blocks, scales, made)
        for row, exponent in enumerate((-125, 0, 124)):
            assert torch.equal(made[0, row].double(), expected * 2.0**exponent)


@pytest.mark.parametrize(("group", "expected"), [(32, 32), (64, 64), (128, 128), (256, 128), (-1, 128)])
def test_dummy_weights_take_the_form_of_4_bits_that_the_models_own_have(group: int, expected: int) -> None:
    weight = torch.randn(2, 64, 512).bfloat16()
    draw_numbers(quantised_form({"quant_method": "awq", "bits": 4, "group_size": group}), weight)
    assert forms_of(weight)[0] == INTEGER_BITS[[128, 64, 32].index(expected)]


def of_floats(strategy: str, **more: Any) -> dict[str, Any]:
    """Return the config of a checkpoint of floats of 8 bits, as compressed-tensors has it."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, **more}
    layout = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return {**layout, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


@pytest.mark.parametrize(
    ("asked", "inputs", "expected"),
    [
        ({"quant_method": "fp8"}, 512, 128),
        ({"quant_method": "fp8"}, 96, 32),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 512, 128),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 288, 32),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, 512, 32),
        (of_floats("channel"), 512, 128),
        (of_floats("block", block_structure=[128, 128]), 512, 128),
    ],
)
def test_dummy_weights_take_the_form_of_fp8_that_the_models_own_have(
    asked: dict[str, Any], inputs: int, expected: int
) -> None:
    weight = torch.randn(2, 64, inputs).bfloat16()
    draw_numbers(quantised_form(asked), weight)
    assert 0.003 < weight.abs().max() < 0.005, "no larger than those of other forms"
    assert forms_of(weight)[0] == FP8_BITS[[128, 32].index(expected)]


@pytest.mark.parametrize(("group", "expected"), [(32, 32), (128, 128), (-1, 128)])
def test_dummy_weights_take_the_form_of_int8_that_the_models_own_have(group: int, expected: int) -> None:
    weight = torch.randn(2, 64, 512).bfloat16()
    draw_numbers(quantised_form({"quant_method": "gptq", "bits": 8, "group_size": group, "sym": True}), weight)
    assert 0.003 < weight.abs().max() < 0.005
    assert forms_of(weight)[0] == INT8_BITS[[128, 32].index(expected)]


def forms_of(weight: Tensor) -> list[GroupedBits]:
    """Return the forms that have a weight's numbers, in the order in which they are tried."""
    fit = [form for form in GROUPED_FORMS if weight.shape[-1] % form.bits.group == 0]
    return [form.bits for form in fit if form.pack(sgl_batch_kernel, weight, form.room(weight.shape))]


@pytest.mark.parametrize("asked", [{"bits": 8}, {"desc_act": True}, {"quant_method": "fp8", "fmt": "e5m2"}])
def test_dummy_weights_that_stay_floats_are_left_alone(asked: dict[str, Any]) -> None:
    weight = torch.randn(2, 64, 512).bfloat16()
    before = weight.clone()
    draw_numbers(quantised_form({"quant_method": "gptq", "bits": 4, "group_size": 32, **asked}), weight)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("block", [None, [128, 128]])
def test_dummy_weights_of_fp8_are_all_its_finite_numbers_times_scales(block: list[int] | None) -> None:
    weight = torch.randn(1, 64, 512).bfloat16()
    draw_numbers(quantised_form({"quant_method": "fp8", "weight_block_size": block}), weight)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = set(codes[codes.isfinite()].tolist())
    for first, scale in ((0, 2.0**-17), (128, 1.25 * 2.0**-17)):
        assert set((weight[..., first : first + 128].float() / scale).flatten().tolist()) == numbers


def test_a_tensor_that_is_kept_stays_as_it_is(floats: Path, tmp_path: Path) -> None:
    path = quantise(floats, tmp_path / "fp8", "fp8-blocks")
    form, file = form_of_weights(str(path)), path / "model.safetensors"
    assert form is not None
    kept = dict(Dequantised(form, torch.float32)([str(file)], load_file(file).items()))
    assert all(torch.equal(kept[name], one) for name, one in loaded(path, torch.float32).items())


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({name: one.contiguous() for name, one in tensors.items()}, path / "model.safetensors")
    return path


def test_memory_is_used_again_while_who_goes_through_tensors_has_the_one_before(floats: Path, tmp_path: Path) -> None:
    path = quantise(floats, tmp_path / "fp8", "fp8-blocks")
    form, file = form_of_weights(str(path)), path / "model.safetensors"
    assert form is not None
    dequantised, stored = Dequantised(form, torch.bfloat16), load_file(file)
    rounded = [name for name in stored if name + "_scale_inv" in stored]
    addresses: list[set[int]] = []
    for _ in range(3):
        found = dequantised([str(file)], stored.items())
        addresses.append({tensor.data_ptr() for name, tensor in found if name in rounded})
    assert len(rounded) == 3
    assert addresses[1] == addresses[2]
    assert len(addresses[1]) == 2


def test_a_scale_that_is_no_number_is_named(floats: Path, tmp_path: Path) -> None:
    path = quantise(floats, tmp_path / "bad", "fp8-blocks")
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    rewritten(path, lambda tensors: tensors[f"{name}_scale_inv"].fill_(float("nan")))
    with pytest.raises(ConfigError, match=rf"{name} has scales that are infinite or no numbers.*quantise the model"):
        loaded(path, torch.float32)


def test_a_quantised_checkpoint_without_safetensors_is_refused(floats: Path, tmp_path: Path) -> None:
    form = form_of_weights(str(quantise(floats, tmp_path / "awq", "awq")))
    assert form is not None
    with pytest.raises(ConfigError, match=r"quantised \(awq\) and not in safetensors files"):
        Dequantised(form, torch.float32)([], [])


def test_a_matrix_of_which_a_tensor_is_not_read_is_named(floats: Path, tmp_path: Path) -> None:
    path = quantise(floats, tmp_path / "awq", "awq")
    form, file = form_of_weights(str(path)), path / "model.safetensors"
    assert form is not None
    some = {name: one for name, one in load_file(file).items() if not name.endswith("q_proj.scales")}
    with pytest.raises(ConfigError, match=r"of 1 quantised matrices were not read: \S*q_proj.weight"):
        list(Dequantised(form, torch.float32)([str(file)], some.items()))


def of_rank(path: Path, experts: range) -> dict[str, Tensor]:
    form, file = form_of_weights(str(path)), path / "model.safetensors"
    assert form is not None
    tensors = Dequantised(form, torch.float32, LoadShare(experts))([str(file)], load_file(file).items())
    return {name: one.clone() for name, one in tensors}


@pytest.mark.parametrize(("experts", "others"), [(range(2), ["down", "up"]), (range(2, 4), [])])
def test_what_another_rank_loads_is_left_out(floats: Path, tmp_path: Path, experts: range, others: list[str]) -> None:
    path = quantise(floats, tmp_path / "awq", "awq")
    everything, own = loaded(path, torch.float32), of_rank(path, experts)
    assert everything.keys() - own.keys() == {f"model.layers.0.mlp.experts.3.{one}_proj.weight" for one in others}
    assert all(torch.equal(one, everything[name]) for name, one in own.items())


def test_of_all_experts_in_one_tensor_a_rank_has_its_own(floats: Path, tmp_path: Path) -> None:
    path, name = quantise(floats, tmp_path / "mxfp4", "mxfp4"), "model.layers.0.mlp.experts.gate_up_proj"
    everything, own = loaded(path, torch.float32)[name], of_rank(path, range(1, 2))[name]
    assert own.shape == everything.shape
    assert torch.equal(own[1], everything[1])
