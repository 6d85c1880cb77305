"""Quantised matrices are found by the headers of their tensors, and refused where these do not belong together."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest

from sgl_batch.checkpoint.files import StoredTensor
from sgl_batch.checkpoint.quantised import GroupedBits, QuantisedTensors, find_quantised, plain_name
from sgl_batch.core.quantised_form import QuantisedForm, QuantisedFormError, quantised_form
from sgl_batch.errors import ConfigError

FILE = Path("model.safetensors")
BYTES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F16": 2, "BF16": 2, "F32": 4, "I32": 4, "I64": 8}


def stored(**tensors: tuple[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    """Return headers, by name with dots for double underscores."""
    return {
        name.replace("__", "."): StoredTensor(FILE, dtype, shape, 0, BYTES[dtype] * prod(shape))
        for name, (dtype, shape) in tensors.items()
    }


def compressed(layout: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


def found(asked: dict[str, Any], **tensors: tuple[str, tuple[int, ...]]) -> QuantisedTensors:
    return find_quantised(stored(**tensors), quantised_form(asked))


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
MXFP4 = {"quant_method": "mxfp4"}
INT4 = compressed(num_bits=4, type="int", strategy="group", group_size=32)
W8A8 = {
    "rows": {"num_bits": 8, "type": "int", "dynamic": True},
    "fixed": {"num_bits": 8, "type": "int", "dynamic": False},
    "floats": {"num_bits": 8, "type": "float", "dynamic": True},
    "kept": None,
}
INT8_BY_128 = GroupedBits(8, 128, 4, is_int8=True)


@pytest.mark.parametrize(
    ("asked", "tensors", "shape"),
    [
        (FP8, {"a__weight": ("F8_E4M3", (200, 300)), "a__weight_scale_inv": ("F32", (2, 3))}, (200, 300)),
        (FP8, {"a__weight": ("F8_E4M3", (200, 300)), "a__weight_scale": ("F32", ())}, (200, 300)),
        (
            GPTQ,
            {"a__qweight": ("I32", (16, 96)), "a__qzeros": ("I32", (4, 12)), "a__scales": ("F16", (4, 96))},
            (96, 128),
        ),
        (
            AWQ,
            {"a__qweight": ("I32", (128, 12)), "a__qzeros": ("I32", (4, 12)), "a__scales": ("F16", (4, 96))},
            (96, 128),
        ),
        (INT4, {"a__weight_packed": ("I32", (96, 16)), "a__weight_scale": ("BF16", (96, 4))}, (96, 128)),
    ],
    ids=["fp8 blocks", "fp8", "gptq", "awq", "packed"],
)
def test_a_matrix_has_the_shape_of_its_floats(
    asked: dict[str, Any], tensors: dict[str, Any], shape: tuple[int, int]
) -> None:
    headers = stored(**tensors, b__weight=("BF16", (7, 5)), a__input_scale=("F32", ()))
    quantised = find_quantised(headers, quantised_form(asked))
    assert quantised.matrices["a.weight"].shape == shape
    assert quantised.unused == {"a.input_scale"}
    plain = quantised.as_floats(headers)
    assert plain.keys() == {"a.weight", "b.weight"}
    assert plain["a.weight"] == StoredTensor(FILE, "BF16", shape, 0, 2 * prod(shape))
    assert plain["b.weight"] is headers["b.weight"]


def test_mxfp4_experts_are_one_tensor_whose_inputs_come_first() -> None:
    tensors = {"e__down_proj_blocks": ("U8", (8, 96, 4, 16)), "e__down_proj_scales": ("U8", (8, 96, 4))}
    quantised = found(MXFP4, **tensors, e__down_proj_bias=("BF16", (8, 96)))
    assert quantised.matrices["e.down_proj"].shape == (8, 128, 96)
    assert quantised.matrix_of() == {
        "e.down_proj_blocks": ("e.down_proj", "_blocks"),
        "e.down_proj_scales": ("e.down_proj", "_scales"),
    }


def gptq_tensors(name: str, inputs: int, group: int, outputs: int = 96) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors of a matrix by the beginning of its name."""
    return {
        f"{name}__qweight": ("I32", (inputs // 8, outputs)),
        f"{name}__qzeros": ("I32", (inputs // group, outputs // 8)),
        f"{name}__scales": ("F16", (inputs // group, outputs)),
    }


def gptq_layer(inputs: dict[str, int], group: int, *, outputs: int = 96, **asked: Any) -> QuantisedTensors:
    """Return matrices of experts by name, and one that is none of theirs, whose groups have `group` inputs."""
    tensors = {}
    for name, size in inputs.items():
        for begin in (f"l__mlp__experts__0__{name}", f"l__mlp__shared_expert__{name}"):
            tensors |= {**gptq_tensors(begin, size, group, outputs), f"{begin}__g_idx": ("I32", (size,))}
    return found({**GPTQ, "group_size": group, **asked}, **tensors)


@pytest.mark.parametrize(("group", "kept"), [(32, 32), (64, 64), (128, 128), (256, 128)])
def test_integers_of_4_bits_stay_so_small(group: int, kept: int) -> None:
    quantised = gptq_layer({"gate_proj": 512, "down_proj": 256}, group)
    begins = ("l.mlp.experts.0", "l.mlp.shared_expert")
    names = [f"{begin}.{one}.weight" for begin in begins for one in ("gate_proj", "down_proj")]
    assert quantised.grouped == dict.fromkeys(names, GroupedBits(4, kept, 4))
    assert quantised.grouped[names[0]].num_bytes(1024) == 512 + 1024 // kept * 4


def gptq_matrices(*names: str, outputs: int = 96, **others: tuple[str, tuple[int, ...]]) -> QuantisedTensors:
    """Return matrices by the beginnings of their names, of 512 inputs in groups of 64, beside other tensors."""
    for name in names:
        others |= gptq_tensors(name, 512, 64, outputs)
    return found({**GPTQ, "group_size": 64}, **others)


def test_matrices_of_attention_stay_in_4_bits_and_those_that_choose_do_not() -> None:
    attention = [f"l__self_attn__{one}" for one in ("q_proj", "o_proj", "kv_b_proj")]
    quantised = gptq_matrices(*attention, "l__mlp__gate", "lm_head")
    assert set(quantised.grouped) == {"l.self_attn.q_proj.weight", "l.self_attn.o_proj.weight"}


def test_what_is_one_product_has_one_form_of_4_bits() -> None:
    matrices = gptq_matrices("l__q_proj", "l__k_proj", "l__o_proj").matrices
    narrow = gptq_matrices("l__k_proj", outputs=80).matrices
    with_narrow = QuantisedTensors(form=quantised_form(GPTQ), matrices={**matrices, **narrow}, unused=frozenset())
    assert set(with_narrow.grouped) == {"l.o_proj.weight"}


def test_what_is_one_product_with_floats_stays_floats() -> None:
    names = ("l__q_proj", "l__o_proj")
    assert set(gptq_matrices(*names).grouped) == {"l.q_proj.weight", "l.o_proj.weight"}
    assert set(gptq_matrices(*names, l__k_proj__weight=("BF16", (32, 512))).grouped) == {"l.o_proj.weight"}


def test_a_layer_has_one_form_of_4_bits_and_none_where_a_matrix_has_none() -> None:
    assert set(gptq_layer({"gate_proj": 512, "down_proj": 192}, 64).grouped.values()) == {GroupedBits(4, 64, 4)}
    assert gptq_layer({"gate_proj": 512, "down_proj": 256}, 16).grouped == {}
    assert gptq_layer({"gate_proj": 512, "down_proj": 256}, 32, outputs=80).grouped == {}
    assert gptq_layer({"gate_proj": 512, "down_proj": 256}, 32, desc_act=True).grouped == {}
    mxfp4 = {
        "l__mlp__experts__down_proj_blocks": ("U8", (8, 96, 4, 16)),
        "l__mlp__experts__down_proj_scales": ("U8", (8, 96, 4)),
    }
    assert found(MXFP4, **mxfp4).grouped == {"l.mlp.experts.down_proj": GroupedBits(4, 32, 1)}


Scaled = tuple[str, int, tuple[int, ...]]
"""The number type of a matrix of 8 bits, its inputs, and the shape of its scales."""


def scaled(
    asked: dict[str, Any], outputs: int = 96, **others: Scaled | tuple[str, tuple[int, ...]]
) -> QuantisedTensors:
    """Return matrices of `outputs` outputs by the beginnings of their names, beside tensors by their whole names."""
    tensors: dict[str, Any] = {}
    for name, one in others.items():
        if len(one) == 2:
            tensors[name] = one
            continue
        dtype, inputs, scales = one
        tensors |= {f"{name}__weight": (dtype, (outputs, inputs)), f"{name}__weight_scale": ("F32", scales)}
    return found(asked, **tensors)


@pytest.mark.parametrize(
    ("block", "inputs", "scales", "group"),
    [
        (None, 512, (), 128),
        (None, 512, (1, 1), 128),
        (None, 512, (96,), 128),
        (None, 512, (96, 1), 128),
        (None, 96, (96, 1), 32),
        (None, 80, (96, 1), None),
        ([128, 128], 512, (1, 4), 128),
        ([128, 128], 288, (1, 3), 32),
        ([128, 128], 64, (1, 1), 32),
        ([64, 256], 512, (2, 2), 128),
        ([64, 64], 512, (2, 8), 32),
        ([64, 64], 512, (96, 1), 128),
        ([128, 48], 480, (1, 10), None),
    ],
)
def test_fp8_stays_in_8_bits_with_groups_within_which_scales_are_one(
    block: list[int] | None, inputs: int, scales: tuple[int, ...], group: int | None
) -> None:
    quantised = scaled({**FP8, "weight_block_size": block}, l__o_proj=("F8_E4M3", inputs, scales))
    assert quantised.grouped == ({} if group is None else {"l.o_proj.weight": GroupedBits(8, group, 4)})
    assert all(form.num_bytes(1024) == 1024 + 1024 // form.group * 4 for form in quantised.grouped.values())


def test_other_numbers_of_8_bits_and_those_with_zero_points_stay_floats() -> None:
    matrices: dict[str, Scaled] = {f"l__{name}__o_proj": (name, 512, (96, 1)) for name in ("F8_E4M3", "F8_E5M2", "I8")}
    small = {"l.F8_E4M3.o_proj.weight": GroupedBits(8, 128, 4), "l.I8.o_proj.weight": INT8_BY_128}
    assert scaled(FP8, **matrices).grouped == small
    zeros: dict[str, Any] = {f"l__{name}__o_proj__weight_zero_point": ("I8", (96, 1)) for name in ("F8_E4M3", "I8")}
    assert scaled(FP8, **matrices, **zeros).grouped == {}
    assert scaled(FP8, l__mlp__gate=("F8_E4M3", 512, (96, 1))).grouped == {}
    assert scaled(FP8, 80, l__o_proj=("F8_E4M3", 512, (80, 1))).grouped == {}


def test_integers_of_8_bits_stay_so_small_without_zero_points_and_with_neighbours_in_a_group() -> None:
    asked = {**GPTQ, "bits": 8, "sym": True, "group_size": 128}
    words = {
        "o_proj__qweight": ("I32", (128, 96)),
        "o_proj__qzeros": ("I32", (4, 24)),
        "o_proj__scales": ("F16", (4, 96)),
    }
    assert found(asked, **words).grouped == {"o_proj.weight": INT8_BY_128}
    for other in ({"sym": False}, {"sym": None}, {"desc_act": True}):
        assert found({**asked, **other}, **words).grouped == {}
    packed = {"o_proj__weight_packed": ("I32", (96, 128)), "o_proj__weight_scale": ("BF16", (96, 1))}
    by_rows = compressed(num_bits=8, type="int", strategy="channel", symmetric=True)
    assert found(by_rows, **packed).grouped == {"o_proj.weight": INT8_BY_128}
    assert found(by_rows, **packed, o_proj__weight_zero_point=("I32", (24, 1))).grouped == {}


def test_an_mlp_of_integers_and_floats_of_8_bits_has_no_form() -> None:
    both: dict[str, Scaled] = {
        "l__mlp__gate_proj": ("I8", 512, (96, 1)),
        "l__mlp__down_proj": ("F8_E4M3", 96, (96, 1)),
    }
    assert scaled(INT4, **both).grouped == {}
    assert len(scaled(INT4, **{name: ("I8", *rest) for name, (_, *rest) in both.items()}).grouped) == 2


def test_fp8_that_is_kept_alike_has_the_smallest_group_and_no_other_form_beside_it() -> None:
    rows = (96, 1)
    gate: dict[str, Scaled] = {"l__mlp__gate_proj": ("F8_E4M3", 512, rows)}
    down: dict[str, Scaled] = {"l__mlp__down_proj": ("F8_E4M3", 96, rows)}
    assert set(scaled(INT4, **gate).grouped.values()) == {GroupedBits(8, 128, 4)}
    assert set(scaled(INT4, **gate, **down).grouped.values()) == {GroupedBits(8, 32, 4)}
    floats: dict[str, Any] = {"l__mlp__down_proj__weight": ("BF16", (96, 96))}
    assert scaled(INT4, **gate, **floats).grouped == {}
    integers: dict[str, Any] = {
        "l__mlp__down_proj__weight_packed": ("I32", (96, 16)),
        "l__mlp__down_proj__weight_scale": ("BF16", (96, 4)),
    }
    assert set(scaled(INT4, **integers).grouped.values()) == {GroupedBits(4, 32, 4)}
    assert scaled(INT4, **gate, **integers).grouped == {}


@pytest.mark.parametrize(
    ("asked", "tensors", "message"),
    [
        (GPTQ, {"a__qweight": ("I32", (16, 96))}, "has a.qweight, quantised by gptq, and no a.scales"),
        (GPTQ, {"a__scales": ("F16", (4, 96))}, "1 tensors of quantised matrices that are not complete: a.scales"),
        (
            GPTQ,
            {"a__qweight": ("I32", (16, 96)), "a__qzeros": ("I32", (4, 12)), "a__scales": ("F16", (5, 96))},
            r"of a in model.safetensors do not belong together \(qweight I32\[16, 96\], scales F16\[5, 96\]",
        ),
        (FP8, {"a__weight": ("F8_E4M3", (200, 300))}, "a matrix of 8 bits has one tensor of scales, and 0 are there"),
        (
            FP8,
            {"a__weight": ("F8_E4M3", (200, 300)), "a__weight_scale_inv": ("F32", (2, 2))},
            r"scales are one, 200 of rows, or of blocks of \(128, 128\)",
        ),
        (
            MXFP4,
            {"e__down_proj_blocks": ("U8", (8, 96, 4, 16)), "e__down_proj_scales": ("U8", (8, 96, 3))},
            "with a scale of a byte each",
        ),
        (INT4, {"a__weight_packed": ("I32", (96, 16)), "a__weight_scale": ("BF16", (96, 5))}, "words are"),
    ],
)
def test_tensors_that_do_not_make_a_matrix_are_named(
    asked: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        found(asked, **tensors)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes, which is none of awq, compressed-tensors, fp8, gptq, mxfp4"),
        ({}, "unknown, which is none of"),
        ({**GPTQ, "bits": 3}, r"gptq of 3 bits, which is none of \(2, 4, 8\)"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "laid out for one GPU kernel"),
        ({**AWQ, "version": "gemv"}, "version 'gemv', and 'gemm' is read"),
        ({**AWQ, "bits": 8}, "awq of 8 bits, and 4 are read"),
        ({**FP8, "weight_block_size": 128}, "fp8, whose fields in config.json cannot be read"),
        (compressed("nvfp4-pack-quantized", num_bits=4, type="float"), "of the format 'nvfp4-pack-quantized'"),
        ({**INT4, "sparsity_config": {"format": "sparse-24-bitmask"}}, "of sparse weights"),
        ({**INT4, "transform_config": {"config_groups": {"u": {}}}}, "weights that are rotated"),
        ({**INT4, "config_groups": [1]}, "whose fields in config.json cannot be read"),
    ],
)
def test_forms_that_are_not_taken_back_to_floats_are_refused(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(QuantisedFormError, match=why):
        quantised_form(asked)


def test_a_form_has_what_the_tensors_do_not_say() -> None:
    assert quantised_form(FP8) == QuantisedForm(method="fp8", block=(128, 128), has_e4m3=True)
    assert quantised_form({**FP8, "fmt": "float8_e4m3fn"}).has_e4m3
    assert not quantised_form({**FP8, "fmt": "e5m2"}).has_e4m3
    assert quantised_form(GPTQ) == QuantisedForm(method="gptq", zero_lack=1, integers=((4, 32),))
    assert [quantised_form({**GPTQ, "sym": one}).symmetric for one in (True, False)] == [True, False]
    assert quantised_form({**GPTQ, "desc_act": True}).reordered
    assert quantised_form({**AWQ, "group_size": -1}).integers == ((4, None),)
    assert quantised_form({**GPTQ, "checkpoint_format": "gptq_v2"}).zero_lack == 0
    assert quantised_form(INT4).integers == ((4, 32),)
    assert quantised_form(compressed(num_bits=8, type="int", strategy="channel")).integers == ((8, None),)
    groups = {
        name: {"weights": {"num_bits": 8, "type": "int"}, "input_activations": rows} for name, rows in W8A8.items()
    }
    for some, expected in ((("rows",), True), (("rows", "kept"), False), (("fixed",), False), (("floats",), False)):
        asked = {**INT4, "config_groups": {name: groups[name] for name in some}}
        assert quantised_form(asked).for_int8_rows == expected
    blocks = compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[64, 128])
    assert quantised_form(blocks) == QuantisedForm(method="compressed-tensors", block=(64, 128), has_e4m3=True)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("model.layers.0.mlp.experts.3.up_proj.weight", "model.layers.0.mlp.experts.3.up_proj.weight"),
        ("model.layers.0.mlp.experts.3.up_proj.weight_scale_inv", "model.layers.0.mlp.experts.3.up_proj.weight"),
        ("model.layers.0.mlp.experts.3.up_proj.weight_scale", "model.layers.0.mlp.experts.3.up_proj.weight"),
        ("model.layers.0.mlp.experts.3.up_proj.weight_packed", "model.layers.0.mlp.experts.3.up_proj.weight"),
        ("model.layers.0.mlp.experts.3.w1.qweight", "model.layers.0.mlp.experts.3.w1.weight"),
        ("model.layers.0.mlp.experts.3.w1.g_idx", "model.layers.0.mlp.experts.3.w1.weight"),
        ("model.layers.0.mlp.experts.3.w1.bias", "model.layers.0.mlp.experts.3.w1.bias"),
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", "model.layers.0.mlp.experts.gate_up_proj"),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", "model.layers.0.mlp.experts.gate_up_proj_bias"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
    ],
)
def test_parts_of_a_matrix_have_the_name_of_its_floats(name: str, plain: str) -> None:
    assert plain_name(name) == plain
