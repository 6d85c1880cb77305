"""Experts that lie in their files as numbers of 4 bits are streamed so, with the numbers of a load of them all."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from four_bit_experts import EXPERTS, HIDDEN, INTER, Tensors, checkpoint, form_of, found, reorder, set_zero_point
from safetensors.torch import load_file, save_file
from streamed_slots import MODULE, fail_for, filled, grouped, hold, loaded_whole, numbers_of

from sgl_batch.errors import ConfigError
from sgl_batch.weights.expert_checkpoint import find_experts

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))
from tiny_models.quantised import quantise

FORMS = ["gptq-4", "gptq-4-128", "awq", "packed-4", "packed-4-zeros", "packed-4-rows"]


@pytest.mark.parametrize(
    ("hidden", "inter", "direct"), [(256, 128, True), (256, 128, False), (96, 160, True), (4096, 1024, True)]
)
@pytest.mark.parametrize("form", FORMS)
def test_slots_have_the_numbers_of_a_checkpoint_that_is_loaded_whole(
    form: str, hidden: int, inter: int, direct: bool, tmp_path: Path
) -> None:
    if form == "gptq-4-128" and hidden % 128:
        hidden, inter = 384, 256
    path = checkpoint(tmp_path, form, hidden=hidden, inter=inter)
    locations, whole = found(path), loaded_whole(path / "model.safetensors", form_of(path))
    assert hold(locations, filled(locations, direct=direct), whole)


def stacked(folder: Path, *, hidden: int, inter: int, change: Callable[[Tensors], None] | None = None) -> Path:
    """Write experts as gpt-oss has them, and return their directory."""
    draw, source = torch.Generator().manual_seed(hidden), folder / "floats"
    source.mkdir()
    shapes = {"gate_up_proj": (EXPERTS, hidden, 2 * inter), "down_proj": (EXPERTS, inter, hidden)}
    tensors = {f"{MODULE}.{name}": torch.randn(shape, generator=draw) / 8 for name, shape in shapes.items()}
    (source / "config.json").write_text("{}")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    path = quantise(source, folder / "quantised", "mxfp4")
    changed = load_file(path / "model.safetensors")
    if change is not None:
        change(changed)
    save_file(changed, path / "model.safetensors", {"format": "pt"})
    return path


def clear_block(tensors: Tensors) -> None:
    """Have a block of zeros, some of them with a sign, whose power of two is none of bfloat16's."""
    tensors[f"{MODULE}.gate_up_proj_blocks"][1, 6, 1] = torch.tensor([0x80, 0x08] * 8, dtype=torch.uint8)
    tensors[f"{MODULE}.gate_up_proj_scales"][1, 6, 1] = 0


@pytest.mark.parametrize("own", [range(EXPERTS), range(1, 2)])
@pytest.mark.parametrize(("hidden", "inter"), [(256, 128), (96, 160), (4096, 1024)])
def test_slots_have_the_numbers_of_mxfp4(hidden: int, inter: int, own: range, tmp_path: Path) -> None:
    path = stacked(tmp_path, hidden=hidden, inter=inter, change=clear_block)
    file = path / "model.safetensors"
    whole = loaded_whole(file, form_of(path))
    locations = find_experts([str(file)], [MODULE], own, stacked=True, form=form_of(path))
    assert locations.expert_bytes == 3 * hidden * inter // 32 * 17
    for expert, (gate, up, down) in zip(own, numbers_of(locations, filled(locations)), strict=True):
        rows = whole[f"{MODULE}.gate_up_proj"][expert].t()
        assert torch.equal(gate, rows[::2])
        assert torch.equal(up, rows[1::2])
        assert torch.equal(down, whole[f"{MODULE}.down_proj"][expert].t())


def test_powers_that_bfloat16_has_not_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[f"{MODULE}.down_proj_scales"][0, 5, 2] = 254

    path = stacked(tmp_path, hidden=HIDDEN, inter=INTER, change=spoil)
    file = str(path / "model.safetensors")
    locations = find_experts([file], [MODULE], range(EXPERTS), stacked=True, form=form_of(path))
    fail_for(locations, 0, r"model\.safetensors: a matrix at byte \d+ has numbers that bfloat16 has not")


def test_groups_of_128_take_fewer_bits(tmp_path: Path) -> None:
    groups = []
    for form in ("gptq-4", "gptq-4-128"):
        (tmp_path / form).mkdir()
        groups.append(grouped(found(checkpoint(tmp_path / form, form))).bits.group)
    assert groups == [32, 128]


def spoil_scale(tensors: Tensors) -> None:
    tensors[f"{MODULE}.1.down_proj.scales"][1, 3] = float("inf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_zero_point, r"model\.safetensors: a matrix whose scales are at byte \d+ has zero points above 15"),
        (spoil_scale, r"model\.safetensors: a matrix whose scales are at byte \d+ has scales that are infinite or no"),
    ],
)
def test_what_no_slot_holds_is_an_error_that_names_the_file(
    change: Callable[[Tensors], None], message: str, tmp_path: Path
) -> None:
    locations = found(checkpoint(tmp_path, "gptq-4", change=change))
    fail_for(locations, 1, message)


def widen_scales(tensors: Tensors) -> None:
    tensors[f"{MODULE}.2.gate_proj.scales"] = tensors[f"{MODULE}.2.gate_proj.scales"].float()


def leave_as_floats(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith(f"{MODULE}.1.up_proj.")]:
        del tensors[name]
    tensors[f"{MODULE}.1.up_proj.weight"] = torch.zeros(INTER, HIDDEN, dtype=torch.bfloat16)


def unpack_zero_points(tensors: Tensors) -> None:
    shape = tensors[f"{MODULE}.0.down_proj.weight_scale"].shape
    tensors[f"{MODULE}.0.down_proj.weight_zero_point"] = torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("gptq-4", reorder, r"2\.gate_proj\.g_idx puts inputs in another order"),
        ("gptq-4", widen_scales, r"2\.gate_proj\.weight is stored as gptq of 4 bits with scales of F32"),
        ("gptq-4", leave_as_floats, r"1\.up_proj\.weight is not quantised, as others are; .*--weights resident"),
        ("packed-4-zeros", unpack_zero_points, r"0\.down_proj\.weight is .* integers have .* zero points in words"),
    ],
)
def test_what_cannot_be_streamed_is_refused(
    form: str, change: Callable[[Tensors], None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        found(checkpoint(tmp_path, form, change=change))


@pytest.mark.parametrize(
    ("form", "is_streamable"),
    [
        *((form, True) for form in (*FORMS, "fp8-blocks", "fp8-rows", "fp8-whole", "mxfp4", "int8-rows")),
        *((form, False) for form in ("gptq-4-reordered", "gptq-8-v2")),
    ],
)
def test_a_config_says_whether_experts_can_be_streamed(form: str, is_streamable: bool, tmp_path: Path) -> None:
    from tiny_models.quantised import FORMS as ALL

    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": ALL[form][0]}))
    assert form_of(tmp_path).is_streamable == is_streamable
